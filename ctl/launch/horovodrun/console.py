"""One line on stderr, as `ctlrun`."""

import functools

from ctl.io import console

say = functools.partial(console.say, by="ctlrun")
