"""One line on stderr, as `ctlrun`."""

import functools

from ctl.launch import saying

say = functools.partial(saying.say, by="ctlrun")
