#include "neff.h"

#include <cstdint>
#include <cstring>

namespace simulator {

// Format: docs/reference/simulated-neff.md
static constexpr size_t   HEADER_SIZE     = 1024;
static constexpr size_t   BUILD_OFFSET    = 40;
static constexpr size_t   LNC_OFFSET      = 552;
static constexpr char     SIMULATED[]     = "kernelgen-simulator";
static constexpr uint64_t SIMULATED_MAJOR = 0x4D4953;  // SIM
static constexpr uint64_t FORMAT          = 3;

static uint64_t u64_at(const uint8_t * data, size_t offset) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) {
        value = value << 8 | data[offset + i];
    }
    return value;
}

uint32_t lnc_of_neff(const void * data) {
    const auto * bytes = static_cast<const uint8_t *>(data);
    return static_cast<uint32_t>(u64_at(bytes, LNC_OFFSET) & UINT32_MAX);
}

NRT_STATUS check_neff_header(const void * data, size_t size, std::string & why) {
    const auto * bytes = static_cast<const uint8_t *>(data);
    if (size < HEADER_SIZE) {
        why = "not a NEFF: " + std::to_string(size) + " bytes, less than the header of " + std::to_string(HEADER_SIZE);
        return NRT_INVALID;
    }
    const uint64_t package = u64_at(bytes, 0);
    const uint64_t header  = u64_at(bytes, 8);
    const uint64_t payload = u64_at(bytes, 16);
    if ((package != 1 && package != 2) || header != HEADER_SIZE) {
        why = "not a NEFF: package version " + std::to_string(package) + " and header size " + std::to_string(header);
        return NRT_INVALID;
    }
    if (payload == 0 || payload != size - HEADER_SIZE) {
        why = "damaged NEFF: the header says " + std::to_string(payload) + " bytes of payload, there are " +
              std::to_string(size - HEADER_SIZE);
        return NRT_INVALID;
    }
    const char * build = reinterpret_cast<const char *>(bytes + BUILD_OFFSET);
    if (strncmp(build, SIMULATED, sizeof(SIMULATED) - 1) != 0) {
        why = "a NEFF for a Neuron device, which the simulator cannot run; compile the kernel with the simulator";
        return NRT_UNSUPPORTED_NEFF_VERSION;
    }
    if (package != 1 || u64_at(bytes, 24) != SIMULATED_MAJOR || u64_at(bytes, 32) != FORMAT) {
        why = "a simulated NEFF of version " + std::to_string(u64_at(bytes, 32)) + "; this simulator reads " +
              std::to_string(FORMAT);
        return NRT_UNSUPPORTED_NEFF_VERSION;
    }
    return NRT_SUCCESS;
}

}  // namespace simulator
