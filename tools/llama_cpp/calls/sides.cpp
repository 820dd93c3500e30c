#include "sides.h"

#include <fstream>
#include <iterator>
#include <stdexcept>

using std::string;

void fail(const string & message) {
    throw std::runtime_error(message);
}

std::vector<uint8_t> state_of(llama_context * context, llama_seq_id seq) {
    std::vector<uint8_t> state(seq < 0 ? llama_state_get_size(context) : llama_state_seq_get_size(context, seq));
    const size_t         size = seq < 0 ? llama_state_get_data(context, state.data(), state.size())
                                        : llama_state_seq_get_data(context, state.data(), state.size(), seq);
    if (size != state.size()) {
        fail("the state has another size");
    }
    return state;
}

llama_model * load_model(const char *                            path,
                         const std::vector<ggml_backend_dev_t> & devices,
                         enum llama_split_mode                   split) {
    llama_model_params params = llama_model_default_params();
    params.devices            = const_cast<ggml_backend_dev_t *>(devices.data());
    params.n_gpu_layers       = devices.front() ? 999 : 0;
    params.split_mode         = split;
    llama_model * model       = llama_model_load_from_file(path, params);
    if (!model) {
        fail(string(path) + ": it can't be loaded");
    }
    return model;
}

std::vector<llama_token> tokens_of(const llama_model * model, const char * path) {
    std::ifstream file(path, std::ios::binary);
    const string  text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (text.empty()) {
        fail(string(path) + ": no text");
    }
    const llama_vocab *      vocab = llama_model_get_vocab(model);
    std::vector<llama_token> tokens(text.size() + 8);
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {  // the tokens are hashes of the bytes and their positions
        const auto n_vocab = (uint32_t) llama_vocab_n_tokens(vocab);
        tokens.resize(text.size());
        for (size_t i = 0; i < text.size(); i++) {
            tokens[i] = (llama_token) (((uint8_t) text[i] * 2654435761u ^ (uint32_t) i * 40503u) % n_vocab);
        }
        return tokens;
    }
    const int n =
        llama_tokenize(vocab, text.data(), (int32_t) text.size(), tokens.data(), (int32_t) tokens.size(), false, false);
    if (n < 1) {
        fail(string(path) + ": no tokens");
    }
    tokens.resize((size_t) n);
    return tokens;
}
