"""Runs the dispatch benchmark with what Bazel built; dispatch.cpp says what it measures."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "backend" / "ggml-neuron" / "test_programs"

os.environ["LD_LIBRARY_PATH"] = str(ROOT / "tools" / "llama_cpp" / "llama_cpp")
program = BUILT / "dispatch"
os.execv(program, [str(program), str(BUILT / "libggml-neuron.so"), str(BUILT / "libnrt-noop.so"), *sys.argv[1:]])
