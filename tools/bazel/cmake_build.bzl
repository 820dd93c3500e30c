"""Builds programs and libraries with another project's own CMake files, as one cached action."""

_SCRIPT = """\
set -eu
source=$PWD/{source} out=$PWD/$1 jobs=$2
shift 2
command -v cmake >/dev/null || {{ echo "error: there is no cmake on PATH (on Debian: apt-get install cmake ninja-build)" >&2; exit 2; }}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
set -- {files} "$@"
if command -v ninja >/dev/null; then set -- -G Ninja "$@"; fi
# No path of this machine in the outputs, and libraries that are found beside what needs them.
prefix="-ffile-prefix-map=$source=. -ffile-prefix-map=$scratch=build"
quietly() {{
  "$@" >"$scratch/log" 2>&1 || {{ tail -n 60 "$scratch/log" >&2; echo "error: failed: $*" >&2; exit 1; }}
}}
quietly cmake -S "$source" -B "$scratch/build" "$@" \\
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS="$prefix" -DCMAKE_CXX_FLAGS="$prefix" \\
  -DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON '-DCMAKE_INSTALL_RPATH=$ORIGIN' \\
  -DCMAKE_RUNTIME_OUTPUT_DIRECTORY="$scratch/build/bin" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$scratch/build/bin"
quietly cmake --build "$scratch/build" --parallel "$jobs" --target {targets}
cp -RL "$scratch/build/bin/." "$out"
"""

_CPUS = 2

# Two processors would be free only when no test runs: such a build would start last, and hold up the end.
def _resources(_os, _inputs):
    return {"cpu": 1, "memory": 1500 * _CPUS}

def _cmake_build_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    arguments = ctx.actions.args()
    arguments.add(out.path)
    arguments.add(str(_CPUS))
    inputs = ctx.files.srcs + [ctx.file.cmakelists]
    for key, value in ctx.attr.defines.items():
        arguments.add("-D{}={}".format(key, value))
    files = []
    for target, key in ctx.attr.folders.items():
        (file,) = target[DefaultInfo].files.to_list()
        files.append('"-D{}=$PWD/{}"'.format(key, file.path if file.is_directory else file.dirname))
        inputs.append(file)
    for target, project in ctx.attr.project_includes.items():
        (file,) = target[DefaultInfo].files.to_list()
        files.append('"-DCMAKE_PROJECT_{}_INCLUDE=$PWD/{}"'.format(project, file.path))
        inputs.append(file)
    ctx.actions.run_shell(
        mnemonic = ctx.attr.mnemonic,
        progress_message = ctx.attr.progress,
        command = _SCRIPT.format(
            files = " ".join(files),
            source = ctx.file.cmakelists.dirname,
            targets = " ".join(ctx.attr.targets),
        ),
        arguments = [arguments],
        inputs = inputs,
        outputs = [out],
        resource_set = _resources,
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles([out]))]

cmake_build = rule(
    doc = "Builds targets of a CMake project into one folder; shared libraries lie beside the programs.",
    implementation = _cmake_build_impl,
    attrs = {
        "cmakelists": attr.label(mandatory = True, allow_single_file = True, doc = "The project's CMakeLists.txt."),
        "defines": attr.string_dict(doc = "Cache variables."),
        "folders": attr.label_keyed_string_dict(
            allow_files = True,
            doc = "Cache variables that name folders: of a file each, or the folder that another build made.",
        ),
        "mnemonic": attr.string(default = "CmakeBuild"),
        "progress": attr.string(default = "Building %{label} with CMake"),
        "project_includes": attr.label_keyed_string_dict(
            allow_files = [".cmake"],
            doc = "CMake files, each with the name of the project of the tree behind whose `project()` it is included.",
        ),
        "srcs": attr.label_list(allow_files = True, mandatory = True, doc = "All files that the build reads."),
        "targets": attr.string_list(mandatory = True),
    },
)

def llama_build(name, llama_cpp = "//tools/llama_cpp", **kwargs):
    """Builds targets of a CMake project that link to a build of llama.cpp. They load its libraries from LD_LIBRARY_PATH.

    Args:
        name: the target's name.
        llama_cpp: the build that it links to.
        **kwargs: further arguments of `cmake_build`.
    """
    cmake_build(
        name = name,
        folders = {
            llama_cpp: "GGML_NEURON_GGML_DIR",
            "@llama_cpp//:CMakeLists.txt": "GGML_NEURON_LLAMA_DIR",
        },
        tags = ["manual"],
        **kwargs
    )
