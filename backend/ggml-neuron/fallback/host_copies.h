// Copies in host memory of weights that are on a device, for ops that the CPU computes with them.
//
// ggml's scheduler reads a weight from the device for each graph in which a node has no kernel for it, and so for each token. From the second
// time on the copy is read instead, as long as GGML_NEURON_FALLBACK_MEMORY has room.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

// What all copies in a process may take, in MiB, unless the variable says otherwise.
constexpr size_t NEURON_FALLBACK_MIB = 1024;

// Returns how many bytes all copies may take. Says once when the variable is not such a number.
size_t neuron_fallback_bytes();

// The copies of what is in one buffer.
class neuron_host_copies {
  public:
    neuron_host_copies() = default;
    ~neuron_host_copies();
    neuron_host_copies(const neuron_host_copies &) = delete;

    // Copies a tensor, known by its offset, and returns true when there is a copy of this version.
    bool get(size_t offset, size_t size, uint64_t version, void * data);

    // Is told that a version was read from the device. Keeps it when it was read before.
    void note(size_t offset, size_t size, uint64_t version, const void * data);

  private:
    struct copy {
        uint64_t             version = 0;
        std::vector<uint8_t> data;  // empty: it was read once
    };

    void forget(copy & c);

    std::mutex             mutex;
    std::map<size_t, copy> copies;  // by offset
};
