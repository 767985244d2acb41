"""Package `perseus` of programs that `ctlrun --as-horovod` starts, for `ctl.hvd.as_horovod` to fill."""

__ctl__ = True  # marks this package for `as_horovod` as not the vendor's

import ctl.hvd.as_horovod  # noqa: F401 (importing it is its use)
