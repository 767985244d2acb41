"""Explanations of errors that TensorFlow and Keras raise while a step is traced or run.

Each explanation is one sentence with the fix. The user's own lines and the original error follow it.
"""

import os
import re

from ctl.errors import UsageError
from ctl.io import error_report

_NO_VALUES = (
    "A step is traced once into a graph, in which tensors have no values yet, so .numpy() and NumPy cannot "
    "read them. Use TensorFlow's functions, tf.print(...) to print a value, self.log(name, value) to "
    "report one; or read it in a hook such as after_loop."
)
_VARIABLES = (
    "The step creates variables: a tf.Variable, a layer, an optimizer or a metric. Create them in build(), "
    "as attributes of self, and use them in the step. On several replicas a function of keras.random also "
    "needs its seed from there: seed=keras.random.SeedGenerator(0)."
)
_NEW_TO_OPTIMIZER = (
    "The optimizer was built without a variable that is trained now. If a layer was frozen, build the "
    "optimizer for all variables in build(), before you freeze any: "
    "self.optimizer.build(self.model.trainable_variables). If the step creates the variable, give the "
    "model its input shape in build(): begin with keras.Input(shape), or call self.model.build(shape)."
)
_SPARSE_LABELS = (
    "The labels do not fit a sparse loss, which takes one integer per example, shape [b]. The batch is "
    "{batch}. For one-hot labels use the loss without 'sparse' in its name; for labels of shape [b, 1] "
    "write labels[:, 0]."
)
_TEXT_LABELS = (
    "The labels are strings, and the loss takes integers. The batch is {batch}. Map labels to integers in "
    "train_data, e.g. with keras.layers.StringLookup."
)
# phrases that all occur in the text of an error -> the explanation; the first match counts
_EXPLANATIONS = (
    (("has no attribute 'numpy'",), _NO_VALUES),
    (("Cannot convert a symbolic",), _NO_VALUES),
    (("NumPy", "symbolic"), _NO_VALUES),
    (("only supports singleton tf.Variables",), _VARIABLES),
    (("transitively on placeholder",), _VARIABLES),
    (("tried to create variables on non-first call",), _VARIABLES),
    (("labels", "has DataType string"), _TEXT_LABELS),
    (("Cast string to", "is not supported"), _TEXT_LABELS),
    (("`labels.shape.rank` must equal",), _SPARSE_LABELS),
    (("must have rank (ndim) `target.ndim - 1`",), _SPARSE_LABELS),
    (("`labels.shape` must equal `logits.shape` except",), _SPARSE_LABELS),
    (
        ("label value of", "outside the valid range"),
        "A label is not a class number: expected integers from 0 to the number of the model's outputs "
        "minus 1. Renumber the labels in train_data, or give the last layer more outputs.",
    ),
    (
        ("unknown rank",),
        "A part of the batch has an unknown shape. The batch is {batch}. Declare it in train_data, e.g. "
        "dataset.map(lambda x, y: (tf.ensure_shape(x, [None, 4]), y)) after batch().",
    ),
    (
        ("incompatible with the layer",),
        "A layer got an input of another shape than it was built for. The batch is {batch}. Compare it "
        "with keras.Input(...) in build().",
    ),
    (
        ("'NoneType' object is not callable",),
        "The step calls an object that is None. Set self.model, and what else the step calls, in build().",
    ),
    (
        ("float64", "float32"),
        "Numbers of 64 and of 32 bits meet in the step, which TensorFlow does not mix. NumPy makes "
        "float64: write array.astype('float32') in train_data or eval_data, or tf.cast(value, "
        "tf.float32) in the step. The batch is {batch}.",
    ),
    (("Unknown variable", "built with"), _NEW_TO_OPTIMIZER),
    (("cannot recognize variable",), _NEW_TO_OPTIMIZER),
    (
        ("Iterating over a symbolic",),
        "The step takes a tensor apart as if it were several. The batch is {batch}: does it have the parts "
        "that the step expects, and is the dataset batched?",
    ),
)
_KEY_OF_DICTIONARY = (
    "The step reads batch[{key}], and the batch is a dictionary with the keys {keys}. Write "
    "batch[{first!r}]."
)
_LIBRARIES = (*error_report.LIBRARIES, os.path.dirname(os.path.dirname(__file__)))
_LONGEST_LINE = 300  # characters


def explain_step_error(error: Exception, batch: str, keys: tuple[str, ...] = ()) -> UsageError | None:
    """Returns an explanation of `error`, followed by the user's lines and the error; or None.

    Args:
      error: From the trace or the run of a step.
      batch: Types and shapes of the batch that the step gets.
      keys: Keys of the batch if it is a dictionary.
    """
    text = str(error)
    reason = next((cause for phrases, cause in _EXPLANATIONS if all(p in text for p in phrases)), None)
    if reason is not None:
        reason = reason.format(batch=batch)
    match = re.search(r"KeyError: (\d+)\b", f"{type(error).__name__}: {text}")
    if reason is None and match and keys:
        reason = _KEY_OF_DICTIONARY.format(key=match[1], keys=", ".join(map(repr, keys)), first=keys[0])
    if reason is None:
        return None
    return UsageError(f"{reason}\n{error_report.shortened(text, _LIBRARIES)}")
