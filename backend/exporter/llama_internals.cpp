#include "llama_internals.h"

#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"

#include <algorithm>

namespace {

// Access to private members of llama.cpp's classes: an explicit instantiation may name them.
template <llm_graph_params llm_graph_result::* params> struct private_params {
    friend llm_graph_params llm_graph_result::* params_of_results() { return params; }
};

llm_graph_params llm_graph_result::* params_of_results();
template struct private_params<&llm_graph_result::params>;

using shift_builder = ggml_cgraph * (llama_kv_cache::*)(llm_graph_result *, llama_context *) const;
using params_getter = llm_graph_params (llama_context::*)(llm_graph_result *,
                                                          const llama_ubatch &,
                                                          const llama_memory_context_i *,
                                                          llm_graph_type) const;

shift_builder the_shift_builder();
params_getter the_params_getter();

template <shift_builder shift, params_getter params> struct private_functions {
    friend shift_builder the_shift_builder() { return shift; }

    friend params_getter the_params_getter() { return params; }
};

template struct private_functions<&llama_kv_cache::build_graph_shift, &llama_context::graph_params>;

template <llama_cross llama_context::* cross> struct private_cross {
    friend llama_cross llama_context::* cross_of_contexts() { return cross; }
};

llama_cross llama_context::* cross_of_contexts();
template struct private_cross<&llama_context::cross>;

}  // namespace

cache_lengths lengths_of(const llama_memory_context_i * memory) {
    const auto of_window = [](const llama_kv_cache_iswa_context * c) -> cache_lengths {
        return { c->get_base()->get_n_kv(), c->get_swa()->get_n_kv() };
    };
    if (const auto * kv = dynamic_cast<const llama_kv_cache_context *>(memory)) {
        return { kv->get_n_kv(), 0 };
    }
    if (const auto * iswa = dynamic_cast<const llama_kv_cache_iswa_context *>(memory)) {
        return of_window(iswa);
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_context *>(memory)) {
        return { hybrid->get_attn()->get_n_kv(), 0 };
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa_context *>(memory)) {
        return of_window(hybrid->get_attn());
    }
    if (const auto * dsa = dynamic_cast<const llama_kv_cache_dsa_context *>(memory)) {
        return { dsa->get_mla()->get_n_kv(), 0 };
    }
    if (const auto * dsa = dynamic_cast<const llama_kv_cache_dsa_iswa_context *>(memory)) {
        return { dsa->get_dsa()->get_mla()->get_n_kv(), dsa->get_swa()->get_n_kv() };
    }
    if (const auto * msa = dynamic_cast<const llama_kv_cache_msa_context *>(memory)) {
        return { msa->get_base()->get_n_kv(), 0 };
    }
    return {};
}

std::vector<const llama_kv_cache *> caches_of(const llama_memory_i * memory) {
    if (const auto * kv = dynamic_cast<const llama_kv_cache *>(memory)) {
        return { kv };
    }
    if (const auto * iswa = dynamic_cast<const llama_kv_cache_iswa *>(memory)) {
        return { iswa->get_base(), iswa->get_swa() };
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        return { hybrid->get_mem_attn() };
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        return caches_of(hybrid->get_mem_attn());
    }
    return {};
}

ggml_cgraph * build_without_outputs(const llama_model & model, const llama_context & context) {
    llm_graph_result * result = context.get_gf_res_reserve();
    llm_graph_params   params = result->*params_of_results();
    params.n_outputs          = 0;
    std::fill_n(params.ubatch.output, params.ubatch.n_tokens, 0);
    ggml_backend_sched_reset(context.get_sched());
    result->reset();
    ggml_cgraph * graph = model.build_graph(params);
    ggml_backend_sched_split_graph(context.get_sched(), graph);
    return graph;
}

ggml_cgraph * build_shift(const llama_kv_cache & cache, llm_graph_result & result, llama_context & context) {
    return (cache.*the_shift_builder())(&result, &context);
}

llm_graph_params encoder_params(const llama_context & context, llm_graph_result & result, const llama_ubatch & tokens) {
    return (context.*the_params_getter())(&result, tokens, nullptr, LLM_GRAPH_TYPE_ENCODER);
}

llama_cross & cross_of(llama_context & context) {
    return context.*cross_of_contexts();
}
