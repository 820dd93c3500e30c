"""Sources from a source distribution on PyPI. This machine's pip fetches it by name, version and hash."""

def _pypi_sdist_impl(rctx):
    for name in ["HOME", "XDG_CACHE_HOME", "NEURON_KERNELGEN_CACHE", "PIP_INDEX_URL", "PIP_CONFIG_FILE"]:
        rctx.getenv(name)
    rctx.report_progress("fetching {} {} (once per machine)".format(rctx.attr.distribution, rctx.attr.version))
    done = rctx.execute(
        [
            rctx.path(rctx.attr.python),
            rctx.path(rctx.attr._script),
            "--name={}".format(rctx.attr.distribution),
            "--version={}".format(rctx.attr.version),
            "--sha256={}".format(rctx.attr.sha256),
            "--backend={}".format(rctx.attr.backend),
        ],
        timeout = 1800,
        environment = {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    if done.return_code:
        fail("the source distribution {} {} could not be fetched:\n{}".format(rctx.attr.distribution, rctx.attr.version, done.stderr))

    # Positional, because the last argument's name differs between versions of Bazel.
    rctx.extract(
        done.stdout.strip(),
        "",
        "{}-{}/{}".format(rctx.attr.distribution.replace("-", "_"), rctx.attr.version, rctx.attr.folder),
    )
    for path in rctx.attr.remove:
        rctx.delete(path)
    rctx.file("BUILD.bazel", rctx.attr.build_file_content)

pypi_sdist = repository_rule(
    doc = "A folder of a source distribution, unpacked.",
    implementation = _pypi_sdist_impl,
    attrs = {
        "backend": attr.string(mandatory = True, doc = "The build backend that its pyproject.toml names; it is not run."),
        "build_file_content": attr.string(mandatory = True),
        "distribution": attr.string(mandatory = True, doc = "The distribution's name."),
        "folder": attr.string(doc = "The folder of the archive that becomes the repository."),
        "python": attr.label(mandatory = True, doc = "`//:python` of an environment that has pip."),
        "remove": attr.string_list(doc = "Files and folders to leave out."),
        "sha256": attr.string(mandatory = True),
        "version": attr.string(mandatory = True),
        "_script": attr.label(default = "//rules/private/repositories:pypi_sdist.py"),
    },
)

_LLAMA_CPP = """\
package(default_visibility = ["//visibility:public"])

exports_files(["CMakeLists.txt"])

# What the library, its backends and its test programs are built from.
filegroup(
    name = "sources",
    srcs = ["CMakeLists.txt"] + glob([
        "cmake/**",
        "common/**",
        "ggml/**",
        "include/**",
        "licenses/**",
        "src/**",
        "tests/**",
        "tools/**",
        "vendor/**",
        "LICENSE",
    ]),
)

# The same with its server.
filegroup(
    name = "server",
    srcs = [
        "scripts/ui-assets.cmake",
        ":sources",
    ],
)

# What its CMake files read when they are configured with nothing switched off.
filegroup(
    name = "tree",
    srcs = [":sources"] + glob([
        "app/**",
        "examples/**",
        "pocs/**",
    ]),
)

# What a program outside of the tree is compiled with that uses the library's own classes.
filegroup(
    name = "headers",
    srcs = [
        "CMakeLists.txt",
        "ggml/CMakeLists.txt",
    ] + glob([
        "ggml/include/*.h",
        "ggml/src/*.h",
        "include/*.h",
        "src/*.h",
    ]),
)

# What computes embeddings of images and sound.
filegroup(
    name = "mtmd",
    srcs = glob([
        "tools/mtmd/**/*.cpp",
        "tools/mtmd/**/*.h",
    ]),
)

# The program that makes GGUF files of Hugging Face models.
filegroup(
    name = "converter",
    srcs = ["convert_hf_to_gguf.py"] + glob([
        "conversion/*.py",
        "gguf-py/gguf/**/*.py",
        "requirements/*.txt",
    ]),
)

# What a backend outside of the tree is compiled with.
filegroup(
    name = "ggml_headers",
    srcs = ["ggml/CMakeLists.txt"] + glob([
        "ggml/include/*.h",
        "ggml/src/*.h",
    ]),
)
"""

def llama_cpp(name = "llama_cpp"):
    """Declares the llama.cpp for this project's tests: the copy in the PyPI distribution `llama-cpp-python`.

    Args:
        name: the repository's name.
    """
    pypi_sdist(
        name = name,
        backend = "scikit_build_core.build",
        build_file_content = _LLAMA_CPP,
        distribution = "llama-cpp-python",
        folder = "vendor/llama.cpp",
        python = Label("@neuron_python//:python"),
        remove = ["docs", "media", "models"],
        sha256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        version = "0.3.36",
    )
