"""Declares one test target for each folder of tests."""

load("//tools/bazel:kernelgen_tool.bzl", "kernelgen_py_test")

# The files that any Python test may import or read.
_PROJECT = [
    "//:project_files",
    "//kernels",
    "//manifests:yaml",
    "//tools/kernelgen:kernelgen_sources",
]

def pytest_folder(name, data = [], size = "medium", **kwargs):
    """Declares the tests in `<name>/`.

    Args:
        name: the folder.
        data: the files that these tests read besides kernelgen, the kernels and the manifests.
        size: Bazel's size of the test.
        **kwargs: further attributes of the rule.
    """
    kernelgen_py_test(
        name = name,
        size = size,
        srcs = native.glob([name + "/**/*.py"]) + ["conftest.py"],
        data = data + _PROJECT + [":data"] + native.glob(
            [name + "/**"],
            exclude = ["**/*.py", "**/*.pyc"],
        ),
        **kwargs
    )

def pytest_folder_with_bazel(name, tags = [], **kwargs):
    """Like `pytest_folder`, for tests that run Bazel themselves, in scratch checkouts.

    Args:
        name: the folder's name.
        tags: further tags of the test.
        **kwargs: further arguments of `pytest_folder`.
    """
    pytest_folder(
        name = name,
        size = "large",
        env_inherit = [
            "HOME",
            "NEURON_KERNELGEN_CACHE",
            "NEURON_KERNELGEN_OFFLINE",
            "NEURON_KERNELGEN_PYTHON",
            "PATH",
            "XDG_CACHE_HOME",
        ],
        tags = [
            "no-sandbox",
            "requires-network",
        ] + tags,
        **kwargs
    )
