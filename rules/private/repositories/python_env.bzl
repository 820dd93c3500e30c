"""The Python environment of the build steps, from a hash-locked requirements file.

The environment has some 7,000 files: too many to declare as inputs and to stage into a sandbox for each action. It is in the user's
cache folder under a key (see `python_env.py`), and actions depend on a launcher that contains the key and no path. So a new lock file
or interpreter changes every action that depends on the launcher, and a moved checkout changes no action. The simulator's compiles
depend on a launcher that contains only the version of jaxlib.
"""

_LAUNCHER = """\
#!/bin/sh
# Runs the Python of the environment {key}.
# Beside the launcher's real file stands a link to it; a machine that only got a copy (a remote worker) looks in the cache folder.
self=$(readlink -f "$0")
for env in "${{self%/*}}/env" "${{NEURON_KERNELGEN_CACHE:-${{XDG_CACHE_HOME:-${{HOME:-$(eval echo "~$(id -un 2>/dev/null)")}}/.cache}}/neuron-kernelgen}}/python/{key}"; do
  [ -e "$env/complete" ] && exec "$env/bin/python" "$@"
done
echo "error: the Python environment {key} is not on this machine; './bazelw fetch --force //...' makes it again" >&2
exit 2
"""

# The launcher for a single package whose version alone determines the output of some steps. These steps depend on the version and
# not on the rest of the environment.
_PACKAGE_LAUNCHER = """\
#!/bin/sh
# Runs a Python that has {package} {version}: this build's, or on a machine that only got a copy any that it has.
self=$(readlink -f "$0")
for env in "${{self%/*}}/env" "${{NEURON_KERNELGEN_CACHE:-${{XDG_CACHE_HOME:-${{HOME:-$(eval echo "~$(id -un 2>/dev/null)")}}/.cache}}/neuron-kernelgen}}/python"/*; do
  for found in "$env"/lib/python3*/site-packages/{package}-{version}.dist-info; do
    [ -d "$found" ] && [ -e "$env/complete" ] && exec "$env/bin/python" "$@"
  done
done
echo "error: no Python environment with {package} {version} is on this machine; './bazelw fetch --force //...' makes it again" >&2
exit 2
"""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

exports_files({launchers})
"""

# The script's exit status for an unsuitable Python.
_UNFIT = 3

def pythons(rctx):
    """Finds the interpreters to try.

    Args:
        rctx: the repository rule's context.

    Returns:
        the interpreter that NEURON_KERNELGEN_PYTHON names, or the interpreters on PATH, with the system's `python3` first.
    """
    named = rctx.getenv("NEURON_KERNELGEN_PYTHON")
    if named:
        path = rctx.which(named) if "/" not in named else rctx.path(named)
        if not path or not path.exists:
            fail("NEURON_KERNELGEN_PYTHON names '{}', which is not there".format(named))
        return [path]
    found = [rctx.which(name) for name in ["python3", "python3.14", "python3.13", "python3.12", "python3.11"]]
    return [path for path in found if path]

def _python_env_impl(rctx):
    for name in ["HOME", "XDG_CACHE_HOME", "NEURON_KERNELGEN_CACHE", "PIP_INDEX_URL", "PIP_CONFIG_FILE"]:
        rctx.getenv(name)
    lock = rctx.path(rctx.attr.lock)
    rctx.watch(lock)
    arguments = [rctx.path(rctx.attr._script), "--lock", lock, "--fallback", rctx.path("fallback")]
    if rctx.attr.base:
        arguments += ["--base", rctx.path(rctx.attr.base).dirname.get_child("env")]
    rctx.report_progress("installing the packages of {} (once per machine)".format(rctx.attr.lock.name))
    done, unfit = None, True
    for python in pythons(rctx):
        done = rctx.execute([python] + arguments, timeout = 1800, environment = {"PYTHONDONTWRITEBYTECODE": "1"})

        # An old Python cannot even parse the script.
        unfit = done.return_code == _UNFIT or "SyntaxError" in done.stderr
        if not unfit:
            break
    if unfit:
        fail("""\
no Python 3.11 or later with the venv module on PATH. One of these fixes it:
    apt-get install python3-venv                    on Debian 12 and Ubuntu 24.04 or later
    export NEURON_KERNELGEN_PYTHON=<interpreter>    when it is elsewhere{}""".format("\n" + done.stderr if done else ""))
    if done.return_code:
        fail("the Python environment of {} could not be made:\n{}".format(rctx.attr.lock, done.stderr))
    env = json.decode(done.stdout)
    rctx.symlink(env["path"], "env")

    # Creates the environment again after it was deleted.
    rctx.watch(env["path"] + "/complete")
    rctx.file("python", _LAUNCHER.format(key = env["key"]), executable = True)
    launchers = ["python"]
    for package in rctx.attr.packages:
        versions = [line.split("==")[1].split(" ")[0] for line in rctx.read(lock).split("\n") if line.startswith(package + "==")]
        if len(versions) != 1:
            fail("{} does not pin {}".format(rctx.attr.lock, package))
        rctx.file(package, _PACKAGE_LAUNCHER.format(package = package, version = versions[0]), executable = True)
        launchers.append(package)
    rctx.file("BUILD.bazel", _BUILD.format(launchers = repr(launchers)))

python_env = repository_rule(
    doc = "A Python environment; `@name//:python` runs it, and `@name//:<package>` any that has the same version of one package.",
    implementation = _python_env_impl,
    attrs = {
        "lock": attr.label(mandatory = True, allow_single_file = True, doc = "Requirements with hashes."),
        "packages": attr.string_list(doc = "Packages to make launchers for."),
        "base": attr.label(doc = "`//:python` of an environment whose packages are importable too."),
        "_script": attr.label(default = "//rules/private/repositories:python_env.py"),
    },
)
