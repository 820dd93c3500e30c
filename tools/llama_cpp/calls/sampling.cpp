// Samples tokens on the devices of ggml-neuron (llama.cpp's --backend-sampling) and on the CPU, with the same chain and seeds.
//
//     sampling BACKENDS MODEL TEXT CHAIN SEED N_SEQS N_PROMPT N_STEPS N_DRAWS
//
// BACKENDS is the folder of ggml's own backends, MODEL a GGUF file, and TEXT a file with the prompts: sequence s has N_PROMPT
// tokens from the s-th token on. CHAIN has the format of export-graphs (`top_k=40,temperature=0.8,dist`).
//
// In each of N_STEPS calls each sequence has one more token, the one that the device sampled. A line prints the tokens that
// both sides sampled for each sequence, and the number of its logits that came from the device:
//
//     step I device=T,… cpu=T,… on_device=N logits=N,…
//
// With N_DRAWS the last call of the prompt is repeated this many times, and on the CPU ten times more are drawn. The program prints
// how often each side drew each token:
//
//     token T device=N cpu=N

#include "sides.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace {

using std::string;

constexpr int N_CTX = 256;

llama_sampler * make_sampler(const string & name, const std::vector<float> & n, uint32_t seed, int n_vocab) {
    const auto number = [&n](size_t i, float otherwise) {
        return n.size() > i ? n[i] : otherwise;
    };
    if (name == "greedy") {
        return llama_sampler_init_greedy();
    }
    if (name == "dist") {
        return llama_sampler_init_dist(seed);
    }
    if (name == "top_k") {
        return llama_sampler_init_top_k((int32_t) number(0, 40));
    }
    if (name == "top_p") {
        return llama_sampler_init_top_p(number(0, 0.95f), 0);
    }
    if (name == "min_p") {
        return llama_sampler_init_min_p(number(0, 0.05f), 0);
    }
    if (name == "temperature") {
        return llama_sampler_init_temp_ext(number(0, 0.8f), number(1, 0), number(2, 1));
    }
    if (name == "penalties") {
        return llama_sampler_init_penalties(n_vocab, (int32_t) number(0, 64), number(1, 1.1f), number(2, 0),
                                            number(3, 0));
    }
    fail(name + " is not a sampler");
}

sampler_ptr make_chain(const string & text, uint32_t seed, int n_vocab) {
    sampler_ptr        chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    std::istringstream parts(text);
    for (string part; std::getline(parts, part, ',');) {
        const size_t       equals = part.find('=');
        std::vector<float> numbers;
        std::istringstream rest(equals == string::npos ? "" : part.substr(equals + 1));
        for (string number; std::getline(rest, number, ':');) {
            numbers.push_back(strtof(number.c_str(), nullptr));
        }
        llama_sampler_chain_add(chain.get(), make_sampler(part.substr(0, equals), numbers, seed, n_vocab));
    }
    return chain;
}

// A context and the chain of each sequence.
struct side {
    std::vector<sampler_ptr> chains;
    context_ptr              context;

    side(llama_model * model, const string & chain, uint32_t seed, int n_seqs, bool on_device) {
        llama_context_params params  = llama_context_default_params();
        params.n_ctx                 = N_CTX;
        params.n_batch               = 64;
        params.n_ubatch              = 64;
        params.n_seq_max             = (uint32_t) n_seqs;
        params.kv_unified            = true;
        params.n_threads             = 1;
        params.n_threads_batch       = 1;
        // the CPU's flash attention accumulates in F16
        params.flash_attn_type       = on_device ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.n_outputs_max_per_seq = 1;
        const int                             n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        std::vector<llama_sampler_seq_config> configs;
        for (int s = 0; s < n_seqs; s++) {
            chains.push_back(make_chain(chain, seed + (uint32_t) s, n_vocab));
            configs.push_back({ s, chains.back().get() });
        }
        if (on_device) {
            params.samplers   = configs.data();
            params.n_samplers = configs.size();
        }
        context.reset(llama_init_from_model(model, params));
        if (!context) {
            fail("there is no context");
        }
    }

    ~side() { context.reset(); }
};

template <typename T> string joined(const std::vector<T> & values) {
    string text;
    for (const T & value : values) {
        text += (text.empty() ? "" : ",") + std::to_string(value);
    }
    return text;
}

void run(char ** argv) {
    const std::vector<ggml_backend_dev_t> cores = load_backends(argv[1]);
    const model_ptr models[]                    = { load_model(argv[2], { cores.front() }), load_model(argv[2], {}) };

    const string                   chain    = argv[4];
    const auto                     seed     = (uint32_t) atoi(argv[5]);
    const int                      n_seqs   = atoi(argv[6]);
    const int                      n_prompt = atoi(argv[7]);
    const int                      n_steps  = atoi(argv[8]);
    const int                      n_draws  = atoi(argv[9]);
    const int                      n_vocab  = llama_vocab_n_tokens(llama_model_get_vocab(models[0].get()));
    const std::vector<llama_token> tokens   = tokens_of(models[0].get(), argv[3]);
    if ((int) tokens.size() < n_prompt + n_seqs) {
        fail("the text is too short");
    }
    side device(models[0].get(), chain, seed, n_seqs, true);
    side cpu(models[1].get(), chain, seed, n_seqs, false);

    // All tokens of each prompt except the last; then calls with one token of each sequence.
    std::vector<token_at> parts;
    for (int s = 0; s < n_seqs; s++) {
        for (int i = 0; i + 1 < n_prompt; i++) {
            parts.push_back({ tokens[(size_t) (s + i)], i, s, false });
        }
    }
    compute(device.context.get(), parts);
    compute(cpu.context.get(), parts);
    parts.clear();
    for (int s = 0; s < n_seqs; s++) {
        parts.push_back({ tokens[(size_t) (s + n_prompt - 1)], n_prompt - 1, s, true });
    }
    for (int step = 0; step < n_steps; step++) {
        compute(device.context.get(), parts);
        compute(cpu.context.get(), parts);
        std::vector<llama_token> sampled[2];
        std::vector<uint32_t>    logits;
        int                      on_device = 0;
        for (int s = 0; s < n_seqs; s++) {
            on_device += llama_get_sampled_token_ith(device.context.get(), s) != LLAMA_TOKEN_NULL;
            logits.push_back(llama_get_sampled_logits_count_ith(device.context.get(), s));
            for (int i = 0; i < 2; i++) {
                const side & of = i == 0 ? device : cpu;
                sampled[i].push_back(llama_sampler_sample(of.chains[(size_t) s].get(), of.context.get(), s));
            }
            // both sides continue with the device's token
            parts[(size_t) s].token = sampled[0].back();
            parts[(size_t) s].pos++;
        }
        printf("step %d device=%s cpu=%s on_device=%d logits=%s\n", step, joined(sampled[0]).c_str(),
               joined(sampled[1]).c_str(), on_device, joined(logits).c_str());
        fflush(stdout);
    }
    std::map<llama_token, int> drawn[2];
    const token_at             last = { parts[0].token, parts[0].pos, 0, true };
    for (int i = 0; i < n_draws; i++) {
        llama_memory_seq_rm(llama_get_memory(device.context.get()), 0, last.pos, -1);
        compute(device.context.get(), { last });
        drawn[0][llama_sampler_sample(device.chains[0].get(), device.context.get(), 0)]++;
    }
    compute(cpu.context.get(), { last });
    for (int i = 0; i < 10 * n_draws; i++) {
        drawn[1][llama_sampler_sample(cpu.chains[0].get(), cpu.context.get(), 0)]++;
    }
    for (llama_token token = 0; token < n_vocab; token++) {
        if (drawn[0].count(token) || drawn[1].count(token)) {
            printf("token %d device=%d cpu=%d\n", token, drawn[0][token], drawn[1][token]);
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    return run_program(argc, 9, "sampling BACKENDS MODEL TEXT CHAIN SEED N_SEQS N_PROMPT N_STEPS N_DRAWS",
                       [=] { run(argv); });
}
