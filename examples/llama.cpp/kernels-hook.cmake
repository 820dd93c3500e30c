# Adds ggml-neuron, with the kernels of two manifests in it, to the build of an unchanged llama.cpp:
#
#     cmake -S llama.cpp -B build -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF -DCMAKE_PROJECT_ggml_INCLUDE=<this file>
#
# -DNEURON_KERNELGEN_DIR=<folder> names the checkout of neuron-kernelgen when this file is elsewhere.
#
# It sets the same options as -DGGML_NEURON_MANIFESTS and -DGGML_NEURON_TARGETS on the command line.

if(NOT DEFINED NEURON_KERNELGEN_DIR)
    set(NEURON_KERNELGEN_DIR "${CMAKE_CURRENT_LIST_DIR}/../..")
endif()

set(GGML_NEURON_MANIFESTS
    ${CMAKE_CURRENT_LIST_DIR}/attention.yaml
    ${CMAKE_CURRENT_LIST_DIR}/feed_forward.yaml
)
set(GGML_NEURON_TARGETS trn1)

include(${NEURON_KERNELGEN_DIR}/backend/ggml-neuron/ggml-neuron-hook.cmake)
