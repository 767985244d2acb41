"""`horovod` for programs that `ctlrun --as-horovod` starts; `ctl.hvd.as_horovod` takes its place."""

import ctl.hvd.as_horovod  # noqa: F401 (importing it is its use)
