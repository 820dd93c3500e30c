// Reads everything in a damaged bundle that opened.

#pragma once

#include "check.h"
#include "neuron_kernels.h"
#include "pack_builder.h"

#include <cstring>

namespace test {

// The sink of all reads, so that the compiler keeps them.
inline volatile uint64_t sink;

// Calls every function that reads a bundle, and checks what must hold for any bundle that opens.
inline void read_everything(const neuron_kernels * bundle) {
    uint64_t   sum  = 0;
    const auto read = [&](const void * data, size_t size) {
        const uint8_t * bytes = static_cast<const uint8_t *>(data);
        for (size_t i = 0; i < size; i++) {
            sum += bytes[i];
        }
    };
    const auto read_text = [&](const char * text) {
        CHECK(text != nullptr);
        read(text, strlen(text));
    };
    for (const char * name : { "name", "target", "compiler", "flags", "version", "jax_version" }) {
        read_text(neuron_kernels_metadata(bundle, name));
    }
    const size_t n = neuron_kernels_count(bundle);
    CHECK(n > 0 && neuron_kernels_neff_count(bundle) > 0);
    for (size_t i = 0; i < n; i++) {
        const int32_t number = static_cast<int32_t>(i);
        size_t        size;
        const void *  neff = neuron_kernels_neff(bundle, number, &size);
        CHECK(neff && size > 0);
        read(neff, size);
        char message[NEURON_KERNELS_MESSAGE_SIZE];
        CHECK((neuron_kernels_verify(bundle, number, message, sizeof(message)) == NEURON_KERNELS_OK) == !*message);
        const uint64_t * words = neuron_kernels_key(bundle, number, &size);
        CHECK(words && size > 0);
        read(words, size * sizeof(words[0]));
        read_text(neuron_kernels_id(bundle, number));
        read_text(neuron_kernels_hlo_sha256(bundle, number));
        CHECK(static_cast<size_t>(neuron_kernels_neff_index(bundle, number)) < neuron_kernels_neff_count(bundle));
        if (const uint64_t * memory = neuron_kernels_neff_memory(bundle, number)) {
            for (size_t j = 0; j < NEURON_KERNELS_N_MEMORY; j++) {
                CHECK(memory[j] <= NEURON_KERNELS_MAX_MEMORY);
            }
        }
        CHECK(neuron_kernels_find_id(bundle, neuron_kernels_id(bundle, number)) == number);
    }
    for (const auto & kernels : { sample_kernels(), sample_graphs() }) {
        for (const kernel & k : kernels) {
            sum += static_cast<uint64_t>(find(bundle, k));
        }
    }
    sink = sum;
}

}  // namespace test
