"""Methods of single objects are replaced."""

import keras
from ctl.tensorflow_patches.replaced_methods import recorded_calls, replace_method, replaced


def doubled(instance, method):
    return lambda *arguments: 2 * method(*arguments)


def test_a_method_of_an_object_is_replaced_until_the_last_block_ends():
    loss, other = keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError()
    expected = float(other([[0.0]], [[3.0]]))
    with replaced([loss], "call", doubled):
        with replaced([loss], "call", doubled):
            pass
        assert float(loss([[0.0]], [[3.0]])) == 2 * expected
        assert float(other([[0.0]], [[3.0]])) == expected
    assert "call" not in vars(loss)


def test_a_method_that_the_object_had_is_restored():
    loss = keras.losses.MeanSquaredError()
    loss.call = before = lambda y_true, y_pred: y_pred
    with replaced([loss], "call", doubled):
        assert loss.call is not before
    assert vars(loss)["call"] is before


def test_a_method_is_replaced_permanently_in_one_object():
    model, other = (keras.Sequential([keras.layers.Dense(1)]) for _ in range(2))
    replace_method(model, "evaluate", lambda: "replaced")
    assert model.evaluate() == "replaced"
    assert "evaluate" not in vars(other)


def test_keras_calls_the_replacement_and_its_arguments_are_recorded():
    metric = keras.metrics.Mean()
    with recorded_calls([metric], "update_state") as calls:
        metric(3.0)
    assert [(instance, arguments) for instance, arguments in calls] == [(metric, (3.0,))]
    assert float(metric.result()) == 3.0
