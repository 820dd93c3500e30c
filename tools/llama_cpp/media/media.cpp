// Makes embeddings of images and sound with llama.cpp's mtmd, on the device of ggml-neuron that mtmd chooses and on the CPU, and
// compares them.
//
//     media BACKENDS MODEL MMPROJ MEDIA...
//
// BACKENDS is the folder of ggml's own backends, MODEL a GGUF file whose tokens surround images, and MMPROJ the projector's file.
// Each MEDIA is an image of random pixels (640x480) or a noise with a number of samples (48000).
//
// It prints a line for each call of the projector: the input, the number of images, the number of tokens, and the normalised mean
// squared error relative to the CPU. The last line has the device's name, the number of ops that the device computed, and the ops
// that the scheduler gave to the CPU (from its log with GGML_SCHED_DEBUG=2), including mtmd's warm-up.

#include "mtmd.h"
#include "sides.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

namespace {

using std::string;

assigned ops;
string   chosen;

void read_mtmd_log(enum ggml_log_level level, const char * text, void * user_data) {
    char device[64];
    if (watched && sscanf(text, "%*[^:]: CLIP using %63s backend", device) == 1) {
        chosen = device;
    }
    read_log(level, text, user_data);
}

// Makes an image or a sound, the same each time.
mtmd::bitmap make_media(const string & what) {
    std::mt19937 random(1);
    unsigned     width = 0, height = 0;
    if (sscanf(what.c_str(), "%ux%u", &width, &height) == 2) {
        // Smooth, like a scaled image.
        std::vector<unsigned char> pixels((size_t) width * height * 3);
        for (size_t i = 0; i < pixels.size(); i++) {
            pixels[i] = (unsigned char) ((i / 3 % width) * 200 / width + (i / 3 / width) * 30 / height + random() % 26);
        }
        return mtmd::bitmap(width, height, pixels.data());
    }
    std::vector<float>              samples((size_t) atol(what.c_str()));
    std::normal_distribution<float> noise(0, 0.1f);
    for (float & sample : samples) {
        sample = noise(random);
    }
    if (samples.empty()) {
        fail("expected WIDTHxHEIGHT or a number of samples, not " + what);
    }
    return mtmd::bitmap(mtmd_bitmap_init_from_audio(samples.size(), samples.data()));
}

mtmd::context_ptr open(const char * mmproj, const llama_model * model, bool device) {
    mtmd_context_params params = mtmd_context_params_default();
    params.use_gpu             = device;
    params.print_timings       = false;
    params.n_threads           = 1;
    // the CPU's flash attention accumulates in F16
    params.flash_attn_type     = device ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    watched                    = device ? &ops : nullptr;
    mtmd::context_ptr context(mtmd_init_from_file(mmproj, model, params));
    watched = nullptr;
    if (!context) {
        fail(string(mmproj) + ": it can't be loaded");
    }
    return context;
}

// Compares both sides' embeddings of some chunks that are computed together.
void compare(mtmd_context *                                device,
             mtmd_context *                                cpu,
             const std::vector<const mtmd_input_chunk *> & chunks,
             size_t                                        n_embd,
             const string &                                what) {
    mtmd_context *     sides[] = { device, cpu };
    std::vector<float> found[2];
    size_t             n_tokens = 0;
    for (int i = 0; i < 2; i++) {
        mtmd::batch_ptr batch(mtmd_batch_init(sides[i]));
        for (const mtmd_input_chunk * chunk : chunks) {
            if (mtmd_batch_add_chunk(batch.get(), chunk) != 0) {
                fail("a batch does not take what another took");
            }
        }
        watched = i == 0 ? &ops : nullptr;
        if (mtmd_batch_encode(batch.get()) != 0) {
            fail("mtmd can't make embeddings of " + what);
        }
        watched  = nullptr;
        n_tokens = 0;
        for (const mtmd_input_chunk * chunk : chunks) {
            const size_t  n = mtmd_input_chunk_get_n_tokens(chunk);
            const float * e = mtmd_batch_get_output_embd(batch.get(), chunk);
            found[i].insert(found[i].end(), e, e + n * n_embd);
            n_tokens += n;
        }
    }
    const double nmse = nmse_of(found[0].data(), found[1].data(), found[0].size());
    printf("%s chunks=%zu tokens=%zu nmse=%.3g\n", what.c_str(), chunks.size(), n_tokens, nmse);
    fflush(stdout);
}

void run(int argc, char ** argv) {
    mtmd_log_set(read_mtmd_log, nullptr);
    load_backends(argv[1]);
    const model_ptr         model  = load_model(argv[2], {});
    const mtmd::context_ptr device = open(argv[3], model.get(), true);
    const mtmd::context_ptr cpu    = open(argv[3], model.get(), false);
    for (int i = 4; i < argc; i++) {
        const mtmd::bitmap       media = make_media(argv[i]);
        const char *             text  = mtmd_default_marker();
        const mtmd_input_text    input = { text, strlen(text), false, true };
        const mtmd_bitmap *      given = media.ptr.get();
        const mtmd::input_chunks chunks(mtmd_input_chunks_init());
        if (mtmd_tokenize(device.get(), chunks.ptr.get(), &input, &given, 1) != 0) {
            fail(string("mtmd does not take ") + argv[i]);
        }
        // As in llama.cpp's programs: chunks without text between them are computed together, as far as possible.
        std::vector<const mtmd_input_chunk *> together;
        const auto                            flush = [&] {
            if (!together.empty()) {
                compare(device.get(), cpu.get(), together, (size_t) llama_model_n_embd_inp(model.get()), argv[i]);
            }
            together.clear();
        };
        mtmd::batch_ptr batch;
        for (size_t j = 0; j < mtmd_input_chunks_size(chunks.ptr.get()); j++) {
            const mtmd_input_chunk * chunk = mtmd_input_chunks_get(chunks.ptr.get(), j);
            if (mtmd_input_chunk_get_type(chunk) == MTMD_INPUT_CHUNK_TYPE_TEXT) {
                flush();
                continue;
            }
            if (together.empty() || mtmd_batch_add_chunk(batch.get(), chunk) != 0) {
                flush();
                batch.reset(mtmd_batch_init(device.get()));
                mtmd_batch_add_chunk(batch.get(), chunk);
            }
            together.push_back(chunk);
        }
        flush();
    }
    string on_cpu;
    for (const auto & [op, count] : ops.cpu) {
        on_cpu += (on_cpu.empty() ? "" : ",") + op + ":" + std::to_string(count);
    }
    printf("chosen=%s device=%ld cpu=%s\n", chosen.c_str(), ops.device, on_cpu.empty() ? "none" : on_cpu.c_str());
}

}  // namespace

int main(int argc, char ** argv) {
    return run_program(argc, 4, "media BACKENDS MODEL MMPROJ MEDIA...", [=] { run(argc, argv); });
}
