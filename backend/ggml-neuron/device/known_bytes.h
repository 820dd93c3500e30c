// Host copies of bytes that the program wrote to device memory. The host needs them again for masks, which it widens
// for kernels, and for row numbers, which decide whether a mask hides cells. Any other write to the bytes (a launch, a
// copy, a job) invalidates a copy; the next request then reads the device.

#pragma once

#include "device/core.h"

#include <cstddef>
#include <cstdint>

// Copies bytes of a core's memory to `data`. Reads the device only when there is no valid host copy. From then on the
// program's writes to this memory are kept.
//
// locked. `before` as in neuron_memory::read_locked.
NRT_STATUS neuron_recall(const neuron_operand & from, void * data, uint64_t before = NEURON_LAST);

// locked. Returns the host copy, valid until the mutex is unlocked or the memory is written to, or NULL without one.
const uint8_t * neuron_recall_known(const neuron_operand & from);
