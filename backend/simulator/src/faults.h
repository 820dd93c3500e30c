// Injected faults (NEURON_SIMULATOR_FAULT), with which tests show that clients detect them.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace simulator {

class faults {
  public:
    // Reads "execute", "memory@3" (the third time only), "memory/3" (every third time), or several, separated by commas. Returns
    // false, with what is expected in `expected`, when the text is not such a list.
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
