import os
import sys

# Helper modules beside the tests, wherever the tests run from.
sys.path.insert(0, os.path.dirname(__file__))
