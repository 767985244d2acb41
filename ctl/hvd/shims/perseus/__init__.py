"""`perseus` for programs that `ctlrun --as-horovod` starts; `ctl.hvd.as_horovod` adds its modules."""

__ctl__ = True  # tells `as_horovod` that this is no package of the vendor

import ctl.hvd.as_horovod  # noqa: F401 (importing it is its use)
