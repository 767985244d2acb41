"""Registration of training with asynchronous workers."""

from ctl.parameter_server import scheduled_loop, worker_data

create_loop = scheduled_loop.ScheduledLoop
open_worker_data = worker_data.open_train_per_worker
