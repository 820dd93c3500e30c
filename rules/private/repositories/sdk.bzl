"""Finds neuronx-cc on this machine and declares it as a toolchain.

The search covers the virtual environment that NEURON_SDK names, then PATH. The compiler's identity is the version that it prints.
Compile actions depend on this version, but not on the compiler's path or on the Python that runs its driver. If only remote workers
have the compiler, NEURON_SDK_VERSION states the version instead.
"""

load(":python_env.bzl", "pythons")

# The beginning of the first line of `neuronx-cc --version`.
_BANNER = "NeuronX Compiler version "

_BUILD = """\
load("@{rules}//rules/private/rules:neuron_toolchain.bzl", "neuron_toolchain")

package(default_visibility = ["//visibility:public"])

exports_files([
    "neuronx-cc",
    "nki-python3",
    "python3",
])

neuron_toolchain(
    name = "neuronx-cc_toolchain",
    compiler = "neuronx-cc",
    executable = "neuronx-cc",
    identity = {identity},
    nki = {nki},
    nki_absence = {nki_absence},
    nki_identity = {nki_identity},
    python = "python3",
)

toolchain(
    name = "neuronx-cc_registration",
    target_settings = ["@{rules}//rules:neuronx-cc_wanted"],
    toolchain = ":neuronx-cc_toolchain",
    toolchain_type = "@{rules}//rules:toolchain_type",
)
"""

_ABSENT = """\
# {reason}
"""

_IDENTITY = """\
# What compiles are routed by; empty where the simulator stands in.
IDENTITY = {identity}
"""

_LAUNCHER = """\
#!/bin/sh
# Runs {identity}.
# The compiler starts programs that lie beside it, so it is called by its own path and finds them on PATH.
self=$(readlink -f "$0")
if ! compiler=$(readlink "${{self%/*}}/compiler"); then
  # A machine that only got a copy of this file, a remote worker, has a compiler of its own: it must be the same one.
  for compiler in "${{NEURON_SDK:-/nowhere}}/bin/neuronx-cc" "$(command -v neuronx-cc)" /opt/aws_neuronx_venv*/bin/neuronx-cc; do
    # The driver puts this file's folder on PATH.
    [ -x "$compiler" ] && [ "$(readlink -f "$compiler")" != "$self" ] && case "$("$compiler" --version 2>&1)" in *"{banner}{version}"[[:space:]]*|*"{banner}{version}") break ;; esac
    compiler=
  done
  if [ -z "$compiler" ]; then
    echo "error: {identity} is not on this machine: neither in NEURON_SDK, nor on PATH, nor in /opt/aws_neuronx_venv*" >&2
    exit 127
  fi
fi
PATH=${{compiler%/*}}:$PATH exec "$compiler" "$@"
"""

# Files beside the launchers name the interpreter for the driver and the folder of kernelgen's cache. No action has them as inputs.
_PYTHON = """\
#!/bin/sh
# Runs a Python 3.8 or later, for neuronx-cc's driver, which needs its standard library alone.
self=$(readlink -f "$0")
for python in "${self%/*}/interpreter" python3 /usr/bin/python3 /usr/local/bin/python3; do
  command -v "$python" >/dev/null && exec "$python" -I "$@"
done
echo "error: there is no python3 on this machine" >&2
exit 127
"""

# NKI's own compiler is a Python package, beside neuronx-cc or inside it.
_NKI_PYTHON = """\
#!/bin/sh
# Runs the Python that has {identity}, which the driver checks.
self=$(readlink -f "$0")
for python in "${{self%/*}}/nki-interpreter" "${{NEURON_SDK:-/nowhere}}/bin/python3" /opt/aws_neuronx_venv*/bin/python3; do
  [ -x "$python" ] && exec "$python" -I "$@"
done
echo "error: {identity} is not on this machine: neither in NEURON_SDK nor in /opt/aws_neuronx_venv*" >&2
exit 127
"""

_INTERPRETER = """\
#!/bin/sh
exec '{python}' "$@"
"""

_CACHE = """\
#!/bin/sh
# Looks for a NEFF in kernelgen's cache, or runs the command that makes it: see kernelgen/compilers/cached.py.
{settings}
PYTHONPATH='{tools}' PYTHONDONTWRITEBYTECODE=1 PYTHONUTF8=1 exec '{python}' -P -m kernelgen.compilers.cached "$@"
"""

# The variables that configure kernelgen's cache. One of the first two must be set.
_CACHE_VARIABLES = [
    "NEURON_KERNELGEN_NEFF_CACHE",
    "NEURON_KERNELGEN_SHARED_CACHE",
    "NEURON_KERNELGEN_SHARED_CACHE_MODE",
    "NEURON_KERNELGEN_SHARED_CACHE_TIMEOUT",
]

def _find_interpreter(rctx):
    """Writes the file that names the Python for the driver, if there is one."""
    for python in pythons(rctx):
        # A link to a shim that depends on its own name, such as pyenv's, does not work.
        done = rctx.execute([python, "-c", "import os, sys; print(os.path.realpath(getattr(sys, '_base_executable', sys.executable)))"])
        if done.return_code == 0:
            rctx.file("interpreter", _INTERPRETER.format(python = done.stdout.strip()), executable = True)
            return

def _find_nki(rctx, compiler):
    """Writes the launcher of the Python beside neuronx-cc, if it has NKI.

    Returns:
        NKI's name and version, or an empty text; and the reason if NKI is missing.
    """
    pythons = [folder.get_child("python3") for folder in [compiler.dirname, compiler.realpath.dirname]]
    found = [python for python in pythons if python.exists]
    if not found:
        return "", "there is no python3 beside " + str(compiler)
    packages = rctx.execute([found[0], "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).stdout.strip()
    for module in ["nki", "neuronxcc/nki"] if packages else []:
        rctx.watch("%s/%s/__init__.py" % (packages, module))  # NKI may be installed later
    done = rctx.execute([found[0], "-I", rctx.path(rctx.attr._nki_driver), "--which"], timeout = 120)
    identity = done.stdout.strip()
    if done.return_code or not identity:
        said = (done.stderr.strip().split("\n") or [""])[-1]
        return "", "%s has none%s" % (found[0], ": " + said if said else "")
    rctx.file("nki-interpreter", _INTERPRETER.format(python = found[0]), executable = True)
    rctx.file("nki-python3", _NKI_PYTHON.format(identity = identity), executable = True)
    return identity, ""

def _configure_cache(rctx):
    """Writes the program that searches kernelgen's cache, if the environment configures one."""

    # The cache reads credentials from files in HOME, because actions do not get the user's variables.
    values = {name: rctx.getenv(name) for name in _CACHE_VARIABLES + ["HOME"]}
    if [v for v in [values[name] for name in _CACHE_VARIABLES[:2]] if v and v != "off"]:
        rctx.file("neff-cache", executable = True, content = _CACHE.format(
            python = rctx.path(rctx.attr._python),
            settings = "\n".join([
                "export {}='{}'".format(name, value.replace("'", "'\\''"))
                for name, value in values.items()
                if value
            ]),
            tools = rctx.path(rctx.attr._tool).dirname.dirname,
        ))

def _find(rctx):
    sdk = rctx.getenv("NEURON_SDK")
    rctx.getenv("PATH")
    if sdk:
        path = rctx.path(sdk).get_child("bin").get_child("neuronx-cc")
        if not path.exists:
            fail("NEURON_SDK={0}: there is no {0}/bin/neuronx-cc. NEURON_SDK names a virtual environment that holds AWS's neuronx-cc package.".format(sdk))
        return path
    return rctx.which("neuronx-cc")

def _version(rctx, path):
    """Returns the version that a compiler prints."""
    rctx.watch(path)
    done = rctx.execute([path, "--version"], timeout = 120)
    banner = (done.stdout + done.stderr).strip().split("\n")[0].strip()
    if done.return_code or _BANNER not in banner:
        fail("{} is not the Neuron SDK's compiler: --version ended with status {} and printed '{}', not '{}…'".format(path, done.return_code, banner, _BANNER))
    return banner.partition(_BANNER)[2].split(" ")[0]

def _sdk_impl(rctx):
    rules = str(Label("//:BUILD.bazel")).removeprefix("@").partition("//")[0]
    path = _find(rctx)
    stated = rctx.getenv("NEURON_SDK_VERSION")
    if not path and not stated:
        rctx.file("BUILD.bazel", _ABSENT.format(reason = "No neuronx-cc in NEURON_SDK or on PATH, and no NEURON_SDK_VERSION."))
        rctx.file("identity.bzl", _IDENTITY.format(identity = repr("")))
        return
    version = _version(rctx, path) if path else stated
    if stated and version != stated:
        fail("NEURON_SDK_VERSION={}: {} is version {}".format(stated, path, version))
    if [c for c in version.elems() if not c.isalnum() and c not in ".+-_"]:
        fail("NEURON_SDK_VERSION={}: not a version as 'neuronx-cc --version' prints it, as in 2.21.18209.0+043b1bf7".format(version))
    identity = "neuronx-cc " + version
    if path:
        rctx.symlink(path, "compiler")
    launcher = _LAUNCHER.format(banner = _BANNER, identity = identity, version = version)
    rctx.file("neuronx-cc", launcher, executable = True)
    rctx.file("python3", _PYTHON, executable = True)
    _find_interpreter(rctx)
    _configure_cache(rctx)
    rctx.file("identity.bzl", _IDENTITY.format(identity = repr(identity)))
    nki, absence = _find_nki(rctx, path) if path else ("", "neuronx-cc is not on this machine")
    rctx.file("BUILD.bazel", _BUILD.format(
        identity = repr(identity),
        nki = repr("nki-python3" if nki else None),
        nki_absence = repr(absence),
        nki_identity = repr(nki),
        rules = rules,
    ))

neuron_sdk = repository_rule(
    doc = "The Neuron SDK's compiler, when this machine or the remote workers have it.",
    implementation = _sdk_impl,
    attrs = {
        "_nki_driver": attr.label(default = "//tools/kernelgen:compilers/nki_driver.py"),
        "_python": attr.label(default = "@neuron_python//:python"),
        "_tool": attr.label(default = "//tools/kernelgen:__init__.py"),
    },
)
