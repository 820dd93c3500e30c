// Copies in host memory of what the program wrote to device memory, for what the host needs to see of it again: masks, which are made
// longer for kernels, and the numbers of rows that tell whether a mask hides. Whatever else writes to the same bytes (a launch, a copy, a
// job) makes a copy no longer good; then the device is read.

#pragma once

#include "device/core.h"

#include <cstddef>
#include <cstdint>

// Sets `data` to bytes of a core's memory, which are read from it only when it is not known what the program wrote there. From then on
// what the program writes to this memory is kept.
//
// locked. `before` as in neuron_memory::read_locked.
NRT_STATUS neuron_recall(const neuron_operand & from, void * data, uint64_t before = NEURON_LAST);

// locked. Returns the bytes, good until the mutex is let go or the memory written to, or NULL when they are not known.
const uint8_t * neuron_recall_known(const neuron_operand & from);
