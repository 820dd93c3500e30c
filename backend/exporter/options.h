// The command line of export-graphs.

#pragma once

#include "ggml.h"
#include "llama.h"
#include "projector.h"

#include <cstdint>
#include <string>
#include <vector>

// The sizes of one call of llama_decode.
struct graph_size {
    uint32_t n_tokens  = 1;
    uint32_t n_outputs = 1;  // tokens with logits
    uint32_t n_seqs    = 1;  // sequences, with equally many tokens each
    uint32_t n_kv      = 0;  // used cells of the cache after the call; 0: only this call's tokens
};

// A sampler by llama.cpp's name, with its numbers. Omitted numbers have llama.cpp's defaults.
struct sampler_option {
    std::string         name;
    std::vector<double> numbers;
};

// An adapter with its scale, as in llama.cpp's --lora-scaled.
struct scaled_adapter {
    std::string file;
    float       scale = 1;
};

struct options {
    std::string       model;
    uint32_t          n_ctx          = 4096;
    uint32_t          n_ubatch       = 512;
    uint32_t          n_seq_max      = 1;
    ggml_type         type_k         = GGML_TYPE_F16;
    ggml_type         type_v         = GGML_TYPE_F16;
    ggml_type         type_k_draft   = GGML_TYPE_F16;
    ggml_type         type_v_draft   = GGML_TYPE_F16;
    std::vector<bool> flash_attn     = { true };
    bool              kv_unified     = false;
    bool              swa_full       = false;
    int               ftype          = -1;     // llama_ftype; -1: the file's types
    bool              split_tensors  = false;  // over n_devices, as llama.cpp does with -sm tensor
    uint32_t          n_devices      = 1;
    bool              control_vector = false;  // all layers but the first add one
    bool              encoder        = false;  // the graphs of llama_encode
    bool              embeddings     = false;  // calls return embeddings
    int               pooling        = -1;     // llama_pooling_type; -1: the file's
    uint32_t          n_encoded      = 0;  // tokens that a decoder's encoder has computed; 0: as many as in training
    std::string       spec_type;           // draft-simple, draft-mtp, draft-eagle3; empty: no speculative decoding
    std::string       model_draft;         // the file of the draft; empty: the model's own layers are the draft
    uint32_t          draft_n_max = 0;  // most tokens that a draft proposes; a recurrent model keeps this many states
    bool              draft       = false;  // the graphs of the draft in place of the model's graphs
    bool              shift       = false;  // the graphs of context shifts in place of the graphs of calls
    bool              version     = false;
    std::vector<graph_size>     graphs;
    std::vector<scaled_adapter> adapters;

    llama_context_params                 rope = llama_context_default_params();  // only its fields of RoPE are set
    std::vector<llama_model_kv_override> kv_overrides;

    // The file of a projector, to export in place of a model, and the sizes of its inputs besides llama.cpp's warm-up.
    std::string             mmproj;
    std::vector<image_size> images;
    std::vector<uint32_t>   seconds;
    uint32_t                image_min_tokens = 0;  // 0: the file's
    uint32_t                image_max_tokens = 0;

    // The chain of samplers on the device for each sequence, and the user's text for it; empty: calls return logits.
    std::vector<sampler_option> samplers;
    std::string                 chain;
};

// Returns the text of --help.
std::string usage();

// Reads a command line. Returns false if there is nothing to do: `mistake` has the error, or is empty for --help.
bool parse_options(int argc, char ** argv, options & opts, std::string & mistake);
