// The device and the CPU, which get the same calls.

#pragma once

#include "ggml-backend.h"
#include "llama.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

// Raises std::runtime_error.
[[noreturn]] void fail(const std::string & message);

struct models {
    llama_model *            device = nullptr;
    llama_model *            cpu    = nullptr;
    std::vector<llama_token> text;
};

struct free_context {
    void operator()(llama_context * context) const { llama_free(context); }
};

using context_ptr = std::unique_ptr<llama_context, free_context>;

// A context on the device and one on the CPU, which get the same calls.
struct pair {
    context_ptr                                  device;
    context_ptr                                  cpu;
    std::map<llama_seq_id, std::vector<uint8_t>> saved[2];
    context_ptr                                  filled;          // on the CPU, with the device's settings
    llama_context_params                         params    = {};  // the device's
    uint32_t                                     n_ubatch  = 0;   // the CPU's
    llama_token                                  likeliest = -1;  // by the device's last logits
    int                                          n_embd = 0;  // elements of a sequence's embedding; 0: there are logits

    std::vector<llama_context *> both() const {
        return cpu ? std::vector<llama_context *>{ device.get(), cpu.get() }
                   : std::vector<llama_context *>{ device.get() };
    }
};

// Returns the state of a sequence, or of the whole context if `seq` is -1.
std::vector<uint8_t> state_of(llama_context * context, llama_seq_id seq);

// Loads a model on devices, a list that ends with NULL; on the CPU if its first element is NULL.
llama_model * load_model(const char *                            path,
                         const std::vector<ggml_backend_dev_t> & devices,
                         enum llama_split_mode                   split);

// Returns the tokens of a file's text.
std::vector<llama_token> tokens_of(const llama_model * model, const char * path);
