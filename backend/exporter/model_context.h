// A model without its weights, and the context in which its graphs are built. The context tracks the cells of the KV cache as
// in a run, and computes nothing.

#pragma once

#include "llama-context.h"
#include "llama-model.h"
#include "models.h"
#include "options.h"

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

struct free_sampler {
    void operator()(llama_sampler * s) const { llama_sampler_free(s); }
};

struct free_context {
    void operator()(llama_context * c) const { llama_free(c); }
};

using context_ptr = std::unique_ptr<llama_context, free_context>;
using sampler_ptr = std::unique_ptr<llama_sampler, free_sampler>;

struct model_context {
    const options &                   opts;
    std::unordered_set<std::string>   weights;   // names of the files' tensors
    model_ptr                         model;
    model_ptr                         other;     // the model's draft, or the draft's model
    std::vector<llama_adapter_lora *> adapters;  // the model's adapters
    std::vector<float>                scales;
    std::vector<sampler_ptr>          samplers;
    context_ptr                       target;              // the model's context, if `context` is the draft's
    context_ptr                       context;             // empty before open()
    bool                              flash_attn = false;  // the context's settings
    ggml_type                         type_k     = GGML_TYPE_F16;
    ggml_type                         type_v     = GGML_TYPE_F16;

    // others  the files of the model's draft, or of the draft's model; none for a model with its own MTP layers
    model_context(const options &                  opts,
                  const std::vector<sparse_file> & files,
                  const std::vector<sparse_file> & others);

    // Makes a new context and frees the earlier one.
    void open(bool with_flash_attn);

    // Returns whether the model has an encoder and a decoder.
    bool has_both() const;

    // Returns whether the model has a state in place of some or all caches.
    bool is_recurrent() const;

    // Returns whether calls only read the cells of the target's cache, like calls of a Gemma 4 head.
    bool shares_cells() const;

    // Returns the memory of calls; NULL if they use none.
    llama_memory_t memory_of_calls() const;

  private:
    const llama_model & draft_model() const;
    void                check_draft() const;
    void                load_adapter(const scaled_adapter & adapter);
    void                make_samplers();
    void                give_hidden_states();
    void                give_control_vector();
};
