// Host copies of device weights, for ops that the CPU computes with them.
//
// ggml's scheduler reads a weight from the device for each graph with a node that has no kernel for it, and so for each
// token. From the second time on it reads the host copy, if GGML_NEURON_FALLBACK_MEMORY has room for one.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

// The default limit of all copies in a process, in MiB.
constexpr size_t NEURON_FALLBACK_MIB = 1024;

// Returns the limit of all copies in bytes. Reports an invalid value of the variable once.
size_t neuron_fallback_bytes();

// The copies of one buffer's contents.
class neuron_host_copies {
  public:
    neuron_host_copies() = default;
    ~neuron_host_copies();
    neuron_host_copies(const neuron_host_copies &) = delete;

    // Copies a tensor, identified by its offset, to `data`. Returns false when there is no copy of this version.
    bool get(size_t offset, size_t size, uint64_t version, void * data);

    // Notes that a version was read from the device. Keeps a copy from the second read on.
    void note(size_t offset, size_t size, uint64_t version, const void * data);

  private:
    struct copy {
        uint64_t             version = 0;
        std::vector<uint8_t> data;  // empty after the first read
    };

    void forget(copy & c);

    std::mutex             mutex;
    std::map<size_t, copy> copies;  // by offset
};
