"""Package `horovod` of programs that `ctlrun --as-horovod` starts. `ctl.hvd.as_horovod` replaces it."""

import ctl.hvd.as_horovod  # noqa: F401 (importing it is its use)
