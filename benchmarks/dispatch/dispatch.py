"""Runs the dispatch benchmark that Bazel built; dispatch.cpp describes what it measures."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from backend_programs import built

programs = built("backend/ggml-neuron/test_programs", "GGML_NEURON_TEST_PROGRAMS")
os.environ["LD_LIBRARY_PATH"] = str(built("tools/llama_cpp/llama_cpp", "LLAMA_CPP_PROGRAMS"))
program = programs / "dispatch"
os.execv(program, [str(program), str(programs / "libggml-neuron.so"), str(programs / "libnrt-noop.so"), *sys.argv[1:]])
