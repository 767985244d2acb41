"""Code that replaces or calls private parts of TensorFlow, Keras and tf_keras: one module for each part.

The docstring of a module states its purpose, the private objects, the affected versions, the upstream issue
and the switch. `switches.py` turns replacements off; a plain call of a private function has no switch.
"""
