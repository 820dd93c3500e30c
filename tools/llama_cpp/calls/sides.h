// What the programs here share: they make the same calls on NeuronCores and on the CPU.

#pragma once

#include "ggml-backend.h"
#include "llama.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

// Raises std::runtime_error.
[[noreturn]] void fail(const std::string & message);

struct free_llama {
    void operator()(llama_model * model) const { llama_model_free(model); }

    void operator()(llama_context * context) const { llama_free(context); }

    void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
};

using model_ptr   = std::unique_ptr<llama_model, free_llama>;
using context_ptr = std::unique_ptr<llama_context, free_llama>;
using sampler_ptr = std::unique_ptr<llama_sampler, free_llama>;

// The nodes of graphs, by the scheduler's log (GGML_SCHED_DEBUG=2), which has each new graph once.
struct assigned {
    long                        device = 0;
    long                        graphs = 0;
    std::map<std::string, long> cpu;  // by op; the log cuts the name to ten characters
};

// Counts the nodes of the graphs that this thread makes; NULL: does not count.
extern thread_local assigned * watched;

// A callback for llama_log_set. Prints errors and warnings to stderr.
void read_log(enum ggml_log_level level, const char * text, void * user_data);

// Loads ggml's own backends in a folder, and as ggml does the one in GGML_BACKEND_PATH; returns the NeuronCores.
std::vector<ggml_backend_dev_t> load_backends(const char * folder);

// Loads a model on devices; on the CPU if there are none.
model_ptr load_model(const char *                    path,
                     std::vector<ggml_backend_dev_t> devices,
                     enum llama_split_mode           split = LLAMA_SPLIT_MODE_LAYER);

// Returns the tokens of a file's text.
std::vector<llama_token> tokens_of(const llama_model * model, const char * path);

// A token of a sequence at a position; `output` when the logits after it are read.
struct token_at {
    llama_token  token;
    llama_pos    pos;
    llama_seq_id seq;
    bool         output;
};

// Computes a batch of tokens and waits for it; an encoder has no other call than llama_encode.
void compute(llama_context * context, const std::vector<token_at> & tokens);

// Returns the normalised mean squared error of values against the CPU's.
double nmse_of(const float * device, const float * cpu, size_t n);

// Runs a program that needs some number of arguments; prints an error, and returns the exit status.
int run_program(int argc, int least, const char * usage, const std::function<void()> & run);
