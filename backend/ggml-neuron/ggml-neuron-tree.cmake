# ggml-neuron as one of ggml's own backends; runs at the end of ggml's CMakeLists.txt (ggml-neuron-hook.cmake).

include(${CMAKE_CURRENT_LIST_DIR}/ggml-neuron.cmake)

if(NOT COMMAND ggml_add_backend_library)
    message(FATAL_ERROR "ggml-neuron-hook.cmake: this ggml has no ggml_add_backend_library(); it is too old or too new")
endif()

ggml_add_backend_library(ggml-neuron ${GGML_NEURON_SOURCES})
ggml_neuron_configure(ggml-neuron)
target_include_directories(ggml-neuron PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/src ${CMAKE_CURRENT_SOURCE_DIR}/include)
message(STATUS "Including NEURON backend")

# ggml-backend-reg.cpp registers backends that are not loaded at run time by name, and this build must not change that
# file. So the registration code of this backend is included ahead of it, and runs when the program starts.
if(NOT GGML_BACKEND_DL)
    set_property(
        SOURCE ${CMAKE_CURRENT_SOURCE_DIR}/src/ggml-backend-reg.cpp
        TARGET_DIRECTORY ggml
        APPEND PROPERTY COMPILE_OPTIONS -include ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/ggml-neuron-register.h
    )
endif()
