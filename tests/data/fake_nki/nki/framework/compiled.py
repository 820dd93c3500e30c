"""The compiler: it writes a file with its arguments, and refuses a kernel named `refused`."""

import base64
import inspect
import json
from pathlib import Path
from types import SimpleNamespace


def compile_kernel_to_nir(function, *, inputs, compile_opts, enable_cache):
    if function.__name__ == "refused":
        raise ValueError("SBUF has no room for it")
    arrays = {name: value for name, value in inputs.items() if hasattr(value, "shape")}
    made = {
        "of": inspect.getsource(function),
        "arrays": [(name, str(a.dtype), list(a.shape)) for name, a in arrays.items()],
        "others": sorted(name for name in inputs if name not in arrays),
        "target": compile_opts.target,
        "lnc": compile_opts.lnc,
        "cached": enable_cache,
    }
    file = Path(compile_opts.artifacts_dir) / "kernel.nir"
    file.write_text(json.dumps(made))
    text = base64.b64encode(json.dumps({"nir": str(file), "version": 4}).encode()).decode()
    first = next(iter(arrays.values()))
    config = SimpleNamespace(
        backend_config_b64=text,
        output_specs=[SimpleNamespace(shape=first.shape, dtype=first.dtype)],
        operand_output_aliases={},
        has_collectives=False,
    )
    return SimpleNamespace(build_config=lambda: config)
