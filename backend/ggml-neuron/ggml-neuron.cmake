# The list of the backend's sources for every build: see CMakeLists.txt (a separate plugin) and ggml-neuron-hook.cmake
# (inside a llama.cpp tree).

get_filename_component(GGML_NEURON_BACKEND_DIR "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
include(${GGML_NEURON_BACKEND_DIR}/bundle/sources.cmake)

set(GGML_NEURON_SOURCES
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/device/bound_launches.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/device/core.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/device/known_bytes.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/device/launch_queue.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/device/memory.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/device/programs.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/fallback/cost.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/fallback/cpu.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/fallback/cpu_rows.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/fallback/host_copies.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/ggml/backend.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/ggml/buffers.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/ggml/chain.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/ggml/comm.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/ggml/events.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/ggml/host_buffer.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/ggml/registration.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/ggml/supports.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/plan/candidates.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/plan/compute.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/plan/fusion.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/plan/placement.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/plan/plan.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/plan/planner.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/report/environment.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/report/log.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/report/metrics.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/report/missing.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/report/profile.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/report/record_graphs.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/report/statistics.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/causality.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/costs.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/group_choice.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/group_conditions.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/group_fit_blocks.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/group_fit_ops.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/group_fit_slots.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/group_fit_views.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/group_index.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/group_key.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/group_lengths.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/group_pieces.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/group_search.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/groups.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/kernel_store.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/key_nodes.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/laid_out.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/numbers.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/sampler_probe.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/selection.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/streams.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/tokens.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/select/unfused_attention.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/weights/layouts.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/weights/originals.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/weights/repacked.cpp
    ${GGML_NEURON_BACKEND_DIR}/ggml-neuron/weights/weights.cpp
    ${GGML_NEURON_BACKEND_DIR}/nrt/nrt.cpp
    ${NEURON_KERNELS_SOURCES}
)

# Bundles to link in: targets of add_neuron_kernels (with EMBED among their forms), or .c files of
# `kernelgen build --form embed`. A project may set() this variable before it adds the backend.
if(NOT DEFINED GGML_NEURON_EMBED)
    set(GGML_NEURON_EMBED "" CACHE STRING "Kernel bundles to embed in the backend: targets or generated .c files")
endif()

# Adds everything but ggml itself to a backend target.
function(ggml_neuron_configure target)
    target_compile_features(${target} PRIVATE cxx_std_17)
    target_include_directories(${target}
        PRIVATE
            ${GGML_NEURON_BACKEND_DIR}/nrt
            ${GGML_NEURON_BACKEND_DIR}/bundle/include
        PUBLIC
            $<BUILD_INTERFACE:${GGML_NEURON_BACKEND_DIR}/ggml-neuron>
    )
    set_target_properties(${target} PROPERTIES
        CXX_VISIBILITY_PRESET hidden
        VISIBILITY_INLINES_HIDDEN ON
        POSITION_INDEPENDENT_CODE ON
    )
    target_link_libraries(${target} PRIVATE ${CMAKE_DL_LIBS})
    if(GGML_NEURON_EMBED)
        ggml_neuron_embed(${target} ${GGML_NEURON_EMBED})
    endif()
endfunction()

# Links bundles into a backend target, and writes the function that registers them, which the backend calls.
function(ggml_neuron_embed target)
    set(symbols "")
    foreach(item IN LISTS ARGN)
        if(TARGET ${item})
            get_target_property(bundles ${item} NEURON_KERNELS_BUNDLES)
            get_target_property(headers ${item} NEURON_KERNELS_HEADERS)
            if(NOT bundles OR NOT headers)
                message(FATAL_ERROR
                    "GGML_NEURON_EMBED: the target ${item} holds no embedded bundle: is it made by add_neuron_kernels() "
                    "with EMBED in its FORM?")
            endif()
            foreach(bundle IN LISTS bundles)
                list(APPEND symbols neuron_kernels_${bundle})
            endforeach()
            target_link_libraries(${target} PRIVATE ${item})
        elseif(item MATCHES "\\.c$" AND EXISTS "${item}")
            get_filename_component(folder "${item}" DIRECTORY)
            get_filename_component(name "${item}" NAME_WLE)
            get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
            if(NOT "ASM" IN_LIST languages)
                message(FATAL_ERROR "GGML_NEURON_EMBED: enable the language ASM (project(... LANGUAGES C CXX ASM))")
            endif()
            target_sources(${target} PRIVATE "${item}" "${folder}/${name}.S")
            # The assembly includes the pack in the same folder.
            set_property(SOURCE "${folder}/${name}.S" APPEND PROPERTY INCLUDE_DIRECTORIES "${folder}")
            set_property(SOURCE "${folder}/${name}.S" APPEND PROPERTY
                OBJECT_DEPENDS "${folder}/${name}.kernels.gguf")
            string(MAKE_C_IDENTIFIER "neuron_kernels_${name}" symbol)
            list(APPEND symbols ${symbol})
        else()
            message(FATAL_ERROR
                "GGML_NEURON_EMBED: '${item}' is neither a target nor a .c file of `kernelgen build --form embed`")
        endif()
    endforeach()

    set(declarations "")
    set(calls "")
    foreach(symbol IN LISTS symbols)
        string(APPEND declarations "extern const neuron_kernels_table ${symbol};\n")
        string(APPEND calls "    ggml_backend_neuron_register_bundle(&${symbol});\n")
    endforeach()
    set(file "${CMAKE_CURRENT_BINARY_DIR}/${target}-embedded.cpp")
    file(CONFIGURE OUTPUT "${file}" CONTENT [[
// Generated by ggml-neuron.cmake from GGML_NEURON_EMBED.

#include "ggml-neuron.h"
#include "neuron_kernels.h"

extern "C" {
@declarations@}

void ggml_backend_neuron_register_embedded() {
@calls@}
]] @ONLY)
    target_sources(${target} PRIVATE "${file}")
    target_compile_definitions(${target} PRIVATE GGML_NEURON_EMBEDDED)
endfunction()
