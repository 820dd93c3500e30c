#include "model_context.h"

#include "complaints.h"
#include "llama-ext.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

static llama_sampler * make_sampler(const sampler_option & option, int32_t n_vocab) {
    const std::vector<double> & n = option.numbers;
    if (option.name == "logit_bias") {
        const std::vector<llama_logit_bias> biases((size_t) std::max(n[0], 0.0), { 0, 1.0f });
        return llama_sampler_init_logit_bias(n_vocab, (int32_t) biases.size(), biases.data());
    }
    return option.name == "greedy"  ? llama_sampler_init_greedy()
           : option.name == "dist"  ? llama_sampler_init_dist(0)
           : option.name == "top_k" ? llama_sampler_init_top_k((int32_t) n[0])
           : option.name == "top_p" ? llama_sampler_init_top_p((float) n[0], 0)
           : option.name == "min_p" ? llama_sampler_init_min_p((float) n[0], 0)
           : option.name == "penalties"
               ? llama_sampler_init_penalties(n_vocab, (int32_t) n[0], (float) n[1], (float) n[2], (float) n[3])
               : llama_sampler_init_temp_ext((float) n[0], (float) n[1], (float) n[2]);
}

model_context::model_context(const options &                  opts,
                             const std::vector<sparse_file> & files,
                             const std::vector<sparse_file> & others) :
    opts(opts), model(load_model(files, opts.n_devices, opts.spec_type == "draft-mtp", opts.kv_overrides)) {
    if (!others.empty()) {
        model_name = opts.draft ? opts.model : opts.model_draft;
        other      = load_model(others, 1, opts.spec_type == "draft-mtp", opts.kv_overrides);
        model_name = opts.model;
    }
    for (const auto * named : { &files, &others }) {
        for (const sparse_file & file : *named) {
            weights.insert(file.tensor_names().begin(), file.tensor_names().end());
        }
    }
    check_draft();
    for (const scaled_adapter & adapter : opts.adapters) {
        load_adapter(adapter);
    }
}

void model_context::open(bool with_flash_attn) {
    context.reset();
    target.reset();
    llama_context_params params = opts.rope;
    params.n_ctx                = opts.n_ctx;
    params.n_batch              = opts.n_ubatch;
    params.n_ubatch             = opts.n_ubatch;
    params.n_seq_max            = opts.n_seq_max;
    params.type_k               = opts.type_k;
    params.type_v               = opts.type_v;
    params.flash_attn_type      = with_flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.kv_unified           = opts.kv_unified;
    params.swa_full             = opts.swa_full;
    params.embeddings           = opts.embeddings;
    params.pooling_type         = (enum llama_pooling_type) opts.pooling;
    params.no_perf              = true;
    params.n_threads            = 1;
    params.n_threads_batch      = 1;
    params.n_rs_seq             = opts.draft ? 0 : opts.draft_n_max;
    if (opts.draft) {
        // a draft may use the tables and the cache of the model that it drafts for
        target.reset(llama_init_from_model(other ? other.get() : model.get(), params));
        if (!target) {
            throw std::runtime_error("llama.cpp can't make a context of the draft's model: " + last_complaint);
        }
        params.type_k    = opts.type_k_draft;
        params.type_v    = opts.type_v_draft;
        params.ctx_other = target.get();
        params.ctx_type  = opts.spec_type == "draft-mtp" ? LLAMA_CONTEXT_TYPE_MTP : LLAMA_CONTEXT_TYPE_DEFAULT;
    }
    make_samplers();
    std::vector<llama_sampler_seq_config> configs;
    for (size_t s = 0; s < samplers.size(); s++) {
        configs.push_back({ (llama_seq_id) s, samplers[s].get() });
    }
    if (!configs.empty()) {
        params.samplers              = configs.data();
        params.n_samplers            = configs.size();
        params.n_outputs_max_per_seq = 1;
        for (const graph_size & size : opts.graphs) {
            const uint32_t per_seq       = (size.n_outputs + size.n_seqs - 1) / size.n_seqs;
            params.n_outputs_max_per_seq = std::max(params.n_outputs_max_per_seq, per_seq);
        }
    }
    type_k = params.type_k;
    type_v = params.type_v;
    context.reset(llama_init_from_model(model.get(), params));
    if (!context) {
        throw std::runtime_error("llama.cpp can't make a context: " + last_complaint);
    }
    give_hidden_states();
    if (llama_set_adapters_lora(context.get(), adapters.data(), adapters.size(), scales.data()) != 0) {
        throw std::runtime_error("llama.cpp can't use the adapters: " + last_complaint);
    }
    if (opts.control_vector) {
        give_control_vector();
    }
    // llama.cpp turns flash attention off for models that do not support it
    flash_attn = context->get_cparams().flash_attn;
}

bool model_context::has_both() const {
    return llama_model_has_encoder(model.get()) && llama_model_has_decoder(model.get());
}

bool model_context::is_recurrent() const {
    return llama_model_is_recurrent(model.get()) || llama_model_is_hybrid(model.get());
}

bool model_context::shares_cells() const {
    return target && model->arch == LLM_ARCH_GEMMA4_ASSISTANT;
}

// llama.cpp also makes a memory for encoder-only models, but does not use it.
llama_memory_t model_context::memory_of_calls() const {
    return llama_model_has_encoder(model.get()) && !has_both() ? nullptr : context->get_memory();
}

// Returns the draft; the model itself if it has no separate draft.
const llama_model & model_context::draft_model() const {
    return opts.draft || !other ? *model : *other;
}

// Returns why llama.cpp does not use a draft whose vocabulary differs from the model's; empty if they agree. llama.cpp's programs
// compare them the same way (common_speculative_are_compatible in common/speculative.cpp).
static std::string vocabularies_differ(const llama_vocab * model, const llama_vocab * draft) {
    constexpr int32_t MOST_MORE = 128, FIRST_COMPARED = 5;
    const int32_t     n_model = llama_vocab_n_tokens(model), n_draft = llama_vocab_n_tokens(draft);
    if (std::abs(n_model - n_draft) > MOST_MORE) {
        return std::to_string(n_draft) + " tokens, not " + std::to_string(n_model);
    }
    if (llama_vocab_type(model) == LLAMA_VOCAB_TYPE_NONE || llama_vocab_type(draft) == LLAMA_VOCAB_TYPE_NONE) {
        return "";  // a header without its tokens
    }
    if (llama_vocab_type(model) != llama_vocab_type(draft)) {
        return "another kind of tokenizer";
    }
    if (llama_vocab_get_add_bos(model) != llama_vocab_get_add_bos(draft) ||
        (llama_vocab_get_add_bos(model) && llama_vocab_bos(model) != llama_vocab_bos(draft))) {
        return "another token at the beginning of a text";
    }
    if (llama_vocab_get_add_eos(model) != llama_vocab_get_add_eos(draft) ||
        (llama_vocab_get_add_eos(model) && llama_vocab_eos(model) != llama_vocab_eos(draft))) {
        return "another token at the end of a text";
    }
    for (int32_t i = FIRST_COMPARED; i < std::min(n_model, n_draft); i++) {
        if (strcmp(llama_vocab_get_text(model, i), llama_vocab_get_text(draft, i)) != 0) {
            return "another token " + std::to_string(i);
        }
    }
    return "";
}

// llama.cpp aborts if a draft has an unexpected architecture, so this checks it first.
void model_context::check_draft() const {
    if (opts.spec_type == "draft-simple") {
        const std::string difference =
            vocabularies_differ(llama_model_get_vocab(model.get()), llama_model_get_vocab(other.get()));
        if (!difference.empty()) {
            throw std::runtime_error("llama.cpp does not use the draft " + opts.model_draft + ": its vocabulary has " +
                                     difference);
        }
    }
    if (opts.spec_type == "draft-mtp" && llama_model_n_layer_nextn(&draft_model()) == 0) {
        throw std::runtime_error(std::string("the ") + (other ? "draft" : "model") +
                                 " has no MTP layers (--spec-type draft-mtp)");
    }
    if (other && draft_model().arch == LLM_ARCH_GEMMA4_ASSISTANT) {
        const llama_model & read = opts.draft ? *other : *model;
        const int32_t       n = llama_model_n_embd(&read), wanted = llama_model_n_embd_out(&draft_model());
        if (read.arch != LLM_ARCH_GEMMA4 || n != wanted) {
            throw std::runtime_error("the draft is a head of a gemma4 whose embedding has " + std::to_string(wanted) +
                                     " numbers, and the model is a " + read.arch_name() + " with " + std::to_string(n));
        }
    }
    if (opts.spec_type == "draft-eagle3" && draft_model().arch != LLM_ARCH_EAGLE3) {
        throw std::runtime_error("the draft's architecture is not eagle3 (--spec-type draft-eagle3)");
    }
}

// Makes the context return the hidden states that a draft reads, as llama.cpp's speculative decoding does: the model's
// states of all tokens, and the draft's states of outputs.
void model_context::give_hidden_states() {
    if (opts.spec_type == "draft-mtp" || (opts.draft && !opts.spec_type.empty())) {
        llama_set_embeddings_nextn(context.get(), true, /*masked=*/opts.draft);
        return;
    }
    if (opts.spec_type != "draft-eagle3") {
        return;
    }
    const int32_t * layers = llama_model_target_layer_ids(&draft_model());
    for (uint32_t i = 0; i < llama_model_target_layer_ids_n(&draft_model()); i++) {
        const int32_t n_layer = llama_model_n_layer(model.get());
        if (layers[i] < 0 || layers[i] > n_layer) {
            throw std::runtime_error("the draft reads layer " + std::to_string(layers[i]) + " of a model of " +
                                     std::to_string(n_layer));
        }
        if (layers[i] < n_layer) {
            llama_set_embeddings_layer_inp(context.get(), (uint32_t) layers[i], true);
        } else {
            llama_set_embeddings_nextn(context.get(), true, /*masked=*/false);
        }
    }
}

// Reads the header of an adapter. llama.cpp reads zeros as its data.
void model_context::load_adapter(const scaled_adapter & adapter) {
    model_name = adapter.file;
    const sparse_file    file(adapter.file);
    llama_adapter_lora * loaded = llama_adapter_lora_init(model.get(), file.path().c_str());
    if (!loaded) {
        throw std::runtime_error("llama.cpp can't load the adapter: " + last_complaint);
    }
    model_name = opts.model;
    adapters.push_back(loaded);
    scales.push_back(adapter.scale);
    weights.insert(file.tensor_names().begin(), file.tensor_names().end());
}

// Makes a sampler chain for each sequence, as llama.cpp's programs do.
void model_context::make_samplers() {
    samplers.clear();
    for (uint32_t s = 0; s < opts.n_seq_max && !opts.samplers.empty(); s++) {
        samplers.emplace_back(llama_sampler_chain_init(llama_sampler_chain_default_params()));
        for (const sampler_option & option : opts.samplers) {
            const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
            llama_sampler_chain_add(samplers.back().get(), make_sampler(option, n_vocab));
        }
    }
}

void model_context::give_control_vector() {
    // the values begin with layer 1; graphs do not depend on them
    const int32_t            n_embd  = llama_model_n_embd(model.get());
    const int32_t            n_layer = llama_model_n_layer(model.get());
    const std::vector<float> values((size_t) n_embd * (size_t) n_layer);
    if (llama_set_adapter_cvec(context.get(), values.data(), values.size(), n_embd, 1, n_layer) != 0) {
        throw std::runtime_error("llama.cpp can't use a control vector: " + last_complaint);
    }
}
