// Injected faults (NEURON_SIMULATOR_FAULT). Tests use them to show that clients detect errors.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace simulator {

class faults {
  public:
    // Reads "execute", "memory@3" (the third time only), "memory/3" (every third time), or a comma-separated list of
    // these. Returns false, with the expected values in `expected`, for any other text.
    bool read(const std::string & text, std::string & expected);

    bool empty() const { return all_.empty(); }

    // Counts an occasion for a fault, and returns whether to inject it now. Thread-safe.
    bool strikes(const char * name);

  private:
    struct fault {
        std::string           name;
        uint64_t              at    = 0;  // the only occasion; 0: see `every`
        uint64_t              every = 1;
        std::atomic<uint64_t> count{ 0 };
    };

    std::vector<std::unique_ptr<fault>> all_;
};

}  // namespace simulator
