# Builds the kernels of manifests together with the backend, and links them in (docs/guides/embed-kernels.md):
#
#     -DGGML_NEURON_MANIFESTS="a.yaml;b.yaml" [-DGGML_NEURON_TARGETS=trn1]
#
# Include this before ggml-neuron.cmake, and not from code that CMake defers to a folder's end: that code can't add
# folders.

# With the type FILEPATH, a path on CMake's command line is relative to the folder in which CMake is called. A project
# may set() the variables before it adds the backend.
if(NOT DEFINED GGML_NEURON_MANIFESTS OR DEFINED CACHE{GGML_NEURON_MANIFESTS})
    set(GGML_NEURON_MANIFESTS "" CACHE FILEPATH "Manifests whose kernels are built and embedded in the backend")
endif()
if(NOT DEFINED GGML_NEURON_TARGETS)
    set(GGML_NEURON_TARGETS "" CACHE STRING "Only these of their targets (trn1, inf2, ...)")
endif()

if(GGML_NEURON_MANIFESTS)
    include(${CMAKE_CURRENT_LIST_DIR}/../../rules/cmake/NeuronKernels.cmake)
    set(ggml_neuron_targets)
    if(GGML_NEURON_TARGETS)
        set(ggml_neuron_targets TARGETS ${GGML_NEURON_TARGETS})
    endif()
    add_neuron_kernels(ggml-neuron-kernels
        MANIFEST ${GGML_NEURON_MANIFESTS}
        ${ggml_neuron_targets}
        FORM EMBED
        EXCLUDE_FROM_ALL)
    list(APPEND GGML_NEURON_EMBED ggml-neuron-kernels)
endif()
