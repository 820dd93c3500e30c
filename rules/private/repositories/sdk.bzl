"""Finds neuronx-cc on this machine and declares it as a toolchain.

It is looked for in the virtual environment that NEURON_SDK names, then on PATH. Its identity is the version it prints; that, and no
path, is what compile actions depend on.
"""

# How the first line of `neuronx-cc --version` begins.
_BANNER = "NeuronX Compiler version "

_BUILD = """\
load("@{rules}//rules/private/rules:neuron_toolchain.bzl", "neuron_toolchain")

package(default_visibility = ["//visibility:public"])

exports_files(["neuronx-cc"])

neuron_toolchain(
    name = "neuronx-cc_toolchain",
    compiler = "neuronx-cc",
    executable = "neuronx-cc",
    identity = {identity},
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

_LAUNCHER = """\
#!/bin/sh
# Runs {identity}.
# The compiler starts programs that lie beside it, so it is called by its own path and finds them on PATH.
self=$(readlink -f "$0")
compiler=$(readlink "${{self%/*}}/compiler")
PATH=${{compiler%/*}}:$PATH exec "$compiler" "$@"
"""

def _find(rctx):
    sdk = rctx.getenv("NEURON_SDK")
    rctx.getenv("PATH")
    if sdk:
        path = rctx.path(sdk).get_child("bin").get_child("neuronx-cc")
        if not path.exists:
            fail("NEURON_SDK={0}: there is no {0}/bin/neuronx-cc. NEURON_SDK names a virtual environment that holds AWS's neuronx-cc package.".format(sdk))
        return path
    return rctx.which("neuronx-cc")

def _sdk_impl(rctx):
    rules = str(Label("//:BUILD.bazel")).removeprefix("@").partition("//")[0]
    path = _find(rctx)
    if not path:
        rctx.file("BUILD.bazel", _ABSENT.format(reason = "No neuronx-cc in NEURON_SDK or on PATH."))
        return
    rctx.watch(path)
    done = rctx.execute([path, "--version"], timeout = 120)
    banner = (done.stdout + done.stderr).strip().split("\n")[0].strip()
    if done.return_code or _BANNER not in banner:
        fail("{} is not the Neuron SDK's compiler: --version ended with status {} and printed '{}', not '{}…'".format(path, done.return_code, banner, _BANNER))
    identity = "neuronx-cc " + banner.partition(_BANNER)[2].split(" ")[0]
    rctx.symlink(path, "compiler")
    rctx.file("neuronx-cc", _LAUNCHER.format(identity = identity), executable = True)
    rctx.file("BUILD.bazel", _BUILD.format(rules = rules, identity = repr(identity)))

neuron_sdk = repository_rule(
    doc = "The Neuron SDK's compiler, when this machine has it.",
    implementation = _sdk_impl,
)
