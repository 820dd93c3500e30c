#include "sides.h"

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

using std::string;

void fail(const string & message) {
    throw std::runtime_error(message);
}

thread_local assigned * watched = nullptr;

// "node # 12 (   MUL_MAT):  Qcur-0 (  16K) [NEURO         ] use=…": the scheduler cuts the names of backends to five
// characters
void read_log(enum ggml_log_level level, const char * text, void * /* user_data */) {
    if (level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_WARN) {
        fputs(text, stderr);
    }
    char op[16];
    char backend[16];
    int  index = 0;
    if (!watched || sscanf(text, "node #%d ( %15[^)]): %*[^[][ %15[A-Za-z0-9]", &index, op, backend) != 3) {
        return;
    }
    watched->graphs += index == 0;
    if (strncmp(backend, "NEURO", 5) == 0 || strncmp(backend, "Meta", 4) == 0) {
        watched->device++;
    } else {
        watched->cpu[op]++;
    }
}

std::vector<ggml_backend_dev_t> load_backends(const char * folder) {
    llama_log_set(read_log, nullptr);
    ggml_backend_load_all_from_path(folder);
    std::vector<ggml_backend_dev_t> devices;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (strncmp(ggml_backend_dev_name(device), "NEURON", 6) == 0) {
            devices.push_back(device);
        }
    }
    if (devices.empty()) {
        fail("there is no NeuronCore");
    }
    return devices;
}

model_ptr load_model(const char * path, std::vector<ggml_backend_dev_t> devices, enum llama_split_mode split) {
    devices.push_back(nullptr);
    llama_model_params params = llama_model_default_params();
    params.devices            = devices.data();
    params.n_gpu_layers       = devices.front() ? 999 : 0;
    params.split_mode         = split;
    model_ptr model(llama_model_load_from_file(path, params));
    if (!model) {
        fail(string(path) + ": it can't be loaded");
    }
    return model;
}

std::vector<llama_token> tokens_of(const llama_model * model, const char * path) {
    std::ifstream            file(path, std::ios::binary);
    const string             text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const llama_vocab *      vocab = llama_model_get_vocab(model);
    std::vector<llama_token> tokens(text.size() + 8);
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {  // the tokens are hashes of the bytes and their positions
        const auto n_vocab = (uint32_t) llama_vocab_n_tokens(vocab);
        tokens.resize(text.size());
        for (size_t i = 0; i < text.size(); i++) {
            tokens[i] = (llama_token) (((uint8_t) text[i] * 2654435761u ^ (uint32_t) i * 40503u) % n_vocab);
        }
    } else {
        const auto n = (int32_t) tokens.size();
        tokens.resize(
            (size_t) llama_tokenize(vocab, text.data(), (int32_t) text.size(), tokens.data(), n, false, false));
    }
    if (tokens.empty()) {
        fail(string(path) + ": no tokens");
    }
    return tokens;
}

void compute(llama_context * context, const std::vector<token_at> & tokens) {
    llama_batch batch = llama_batch_init((int32_t) tokens.size(), 0, 1);

    const std::unique_ptr<llama_batch, void (*)(llama_batch *)> freed(&batch,
                                                                      [](llama_batch * b) { llama_batch_free(*b); });
    for (const token_at & one : tokens) {
        const int at        = batch.n_tokens++;
        batch.token[at]     = one.token;
        batch.pos[at]       = one.pos;
        batch.n_seq_id[at]  = 1;
        batch.seq_id[at][0] = one.seq;
        batch.logits[at]    = one.output;
    }
    const llama_model * model   = llama_get_model(context);
    const bool          encodes = llama_model_has_encoder(model) && !llama_model_has_decoder(model);
    const int32_t       status  = encodes ? llama_encode(context, batch) : llama_decode(context, batch);
    llama_synchronize(context);
    if (status != 0) {
        fail("llama_decode returns " + std::to_string(status));
    }
}

double nmse_of(const float * device, const float * cpu, size_t n) {
    double error = 0;
    double size  = 0;
    for (size_t i = 0; i < n; i++) {
        const double difference = (double) device[i] - cpu[i];
        error += difference * difference;
        size += (double) cpu[i] * cpu[i];
    }
    return error / size;
}

int run_program(int argc, int least, const char * usage, const std::function<void()> & run) {
    if (argc <= least) {
        fprintf(stderr, "%s\n", usage);
        return 2;
    }
    try {
        run();
    } catch (const std::exception & error) {
        fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
    llama_backend_free();
    return 0;
}
