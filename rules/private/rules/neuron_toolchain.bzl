"""The toolchain: a compiler from HLO to NEFF, identified by its name and version."""

load("//rules/private:providers.bzl", "NeuronToolchainInfo")
load("//tools/bazel:kernelgen_tool.bzl", "KernelgenToolInfo")
load(":compiler_flag.bzl", "CompilerFlagInfo")

_NATIVE = """\
#!/bin/sh
# Runs {identity} on HLO that holds what NKI's own compiler made. neuronx_cc_driver calls this by its absolute path.
root=${{0%/{own}}}
[ "$1" = compile ] || exec "$root/{compiler}" "$@"
# The driver's HOME is not where the Python environment is looked for.
export KERNELGEN_HOME="$HOME" PYTHONPATH="$root/{tools}"
export HOME=
exec "$root/{python}" -P -m {module} "$root/{compiler}" "$@"
"""

_NATIVE_CACHE = """\
#!/bin/sh
# neuronx_cc_driver looks for a cache beside the program that it runs; the SDK's is beside neuronx-cc's launcher.
root=${{0%/{own}}}
cache=$(dirname "$(readlink -f "$root/{compiler}")")/neff-cache
[ -x "$cache" ] || exit 75 # NO_CACHE
exec "$cache" "$@"
"""

def _native(ctx):
    """Returns the program that runs neuronx-cc on HLO of native kernels, and the files that this program runs."""
    tool = ctx.attr._native[KernelgenToolInfo]
    program = ctx.actions.declare_file(ctx.label.name + ".native/neuronx-cc")
    cache = ctx.actions.declare_file(ctx.label.name + ".native/neff-cache")
    ctx.actions.write(cache, is_executable = True, content = _NATIVE_CACHE.format(
        compiler = ctx.file.executable.path,
        own = cache.path,
    ))
    ctx.actions.write(program, is_executable = True, content = _NATIVE.format(
        compiler = ctx.file.executable.path,
        identity = ctx.attr.identity,
        module = tool.module,
        own = program.path,
        python = tool.python.path,
        tools = tool.root,
    ))
    return program, depset([cache, ctx.file.executable, tool.python], transitive = [tool.sources])

def _neuron_toolchain_impl(ctx):
    simulated = ctx.attr.compiler == "simulator"
    if simulated and ctx.attr._flag[CompilerFlagInfo].value == "auto":
        # buildifier: disable=print
        print("neuronx-cc is not installed: the kernels are compiled for the simulator, and no device can run them (to fail instead: --@neuron_kernelgen//rules:compiler=neuronx-cc)")
    native, native_tools = _native(ctx) if ctx.file.executable else (None, depset())
    info = NeuronToolchainInfo(
        compiler = ctx.attr.compiler,
        disabled = ctx.attr.disabled,
        driver = None if simulated else ctx.file._driver,
        executable = ctx.file.executable,
        identity = ctx.attr.identity,
        native = native,
        native_tools = native_tools,
        nki = ctx.file.nki,
        nki_absence = ctx.attr.nki_absence,
        nki_driver = ctx.file._nki_driver,
        nki_identity = ctx.attr.nki_identity,
        python = ctx.file.python,
        simulator = ctx.attr._simulator[KernelgenToolInfo] if simulated else None,
    )
    return [platform_common.ToolchainInfo(neuron = info)]

neuron_toolchain = rule(
    doc = "A compiler for `toolchain_type`. With `disabled`, analysis succeeds and the build fails with the reason.",
    implementation = _neuron_toolchain_impl,
    attrs = {
        "compiler": attr.string(mandatory = True, values = ["neuronx-cc", "simulator"], doc = "Which compiler this is."),
        "disabled": attr.string(doc = "Why this compiler can't be used."),
        "executable": attr.label(allow_single_file = True, doc = "neuronx-cc."),
        "identity": attr.string(doc = "The compiler's name and version, a part of every NEFF's key. The simulator's comes from its sources and jaxlib's version."),
        "nki": attr.label(allow_single_file = True, doc = "A launcher of the Python that has NKI's own compiler. Its content is a part of every native kernel's key."),
        "nki_absence": attr.string(doc = "Why NKI is not available."),
        "nki_identity": attr.string(doc = "The name and version of NKI's own compiler."),
        "python": attr.label(allow_single_file = True, doc = "A launcher of Python 3.8 or later for neuronx-cc's driver. Its content is a part of every NEFF's key, so it should not name a version."),
        "_driver": attr.label(default = "//tools/kernelgen:neuronx_cc_driver", allow_single_file = True),
        "_flag": attr.label(default = "//rules:compiler"),
        "_native": attr.label(default = "//tools/kernelgen:native", providers = [KernelgenToolInfo]),
        "_nki_driver": attr.label(default = "//tools/kernelgen:nki_driver", allow_single_file = True),
        "_simulator": attr.label(default = "//tools/kernelgen:simulate", providers = [KernelgenToolInfo]),
    },
)
