// Host copies of bytes that the program wrote to device memory. The host needs them again for masks, which it widens
// for kernels, and for row numbers, which decide whether a mask hides cells. Any other write to the bytes (a launch, a
// copy) invalidates a copy; the next request then reads the device.

#pragma once

#include "device/core.h"

#include <cstddef>
#include <cstdint>
#include <memory>

// Sets `data` to bytes of a core's memory, which do not change while the caller holds them. Reads the device only when
// there is no valid host copy. From then on the program's writes to this memory are kept.
//
// locked
NRT_STATUS neuron_recall(const neuron_operand & from, std::shared_ptr<const uint8_t> & data);

// locked. Returns the host copy, or NULL without one. It does not change while the caller holds it.
std::shared_ptr<const uint8_t> neuron_recall_known(const neuron_operand & from);
