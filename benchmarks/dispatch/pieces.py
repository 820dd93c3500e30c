"""Runs the benchmark of choosing kernels with what Bazel built; pieces.cpp says what it measures."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

os.environ["LD_LIBRARY_PATH"] = str(ROOT / "tools" / "llama_cpp" / "llama_cpp")
program = ROOT / "backend" / "ggml-neuron" / "test_programs" / "pieces"
os.execv(program, [str(program), *sys.argv[1:]])
