"""Becomes the real tensorflow, which finds fewer optional libraries: see without_companions.py.

Keras with another backend finds none. It would import TensorFlow to seed it.
"""

import os

from without_companions import become

if os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
    raise ImportError
become(__name__)
