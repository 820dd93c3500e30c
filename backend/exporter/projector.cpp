#include "projector.h"

#include "split_devices.h"

// llama.cpp exports neither the functions that build these graphs nor those that choose their sizes. They are compiled here.
#include "clip.cpp"
#include "mtmd.cpp"

#include <set>
#include <tuple>

namespace {

// The sizes on which the graphs of a given number of images depend.
auto kind_of(const clip_image_f32 & image) {
    return std::make_tuple(image.nx(), image.ny(), image.add_viewsep, image.add_newline, image.lead_pad,
                           image.anyres.grid_x, image.anyres.grid_y, image.anyres.orig_nx, image.anyres.orig_ny);
}

struct call_list {
    std::vector<clip_image_f32_batch>                                calls;
    std::set<std::pair<size_t, decltype(kind_of(clip_image_f32()))>> known;

    void add(const clip_image_f32 & image, size_t count, bool is_audio) {
        if (known.insert({ count, kind_of(image) }).second) {
            calls.push_back({ std::vector<clip_image_f32>(count, image), is_audio });
        }
    }
};

// Adds the calls for an image of this size, which is scaled and cut as in llama.cpp.
void add_image(call_list & list, const mtmd_context & mtmd, const image_size & size) {
    clip_image_u8 whole;
    whole.set_size({ size.width, size.height }, /*is_placeholder =*/true);
    const mtmd_image_preproc_out parts  = mtmd.image_preproc->preprocess(whole);
    std::vector<clip_image_f32>  images = parts.entries;
    if (parts.has_overview()) {
        images.insert(images.begin(), parts.overview);
    }
    if (images.empty()) {
        throw std::runtime_error("llama.cpp computes nothing of an image of " + std::to_string(size.width) + "x" +
                                 std::to_string(size.height) + " pixels");
    }
    for (const clip_image_f32 & image : images) {
        list.add(image, 1, false);
        if (!clip_support_batch(mtmd.ctx_v)) {
            continue;
        }
        // parts without text between them are computed in batches
        const size_t equal = (size_t) std::count_if(images.begin(), images.end(), [&](const clip_image_f32 & other) {
            return kind_of(other) == kind_of(image);
        });
        const size_t most  = std::max(1, mtmd.batch_max_tokens / std::max(1, clip_n_output_tokens(mtmd.ctx_v, &image)));
        for (const size_t count : { std::min(equal, most), equal % most }) {
            if (count) {
                list.add(image, count, false);
            }
        }
    }
}

void add_sound(call_list & list, const mtmd_context & mtmd, uint32_t seconds) {
    const std::vector<float>    samples((size_t) seconds * (size_t) mtmd_get_audio_sample_rate(&mtmd));
    std::vector<mtmd_audio_mel> pieces;
    if (samples.empty() || !mtmd.audio_preproc->preprocess(samples.data(), samples.size(), pieces)) {
        throw std::runtime_error("llama.cpp computes nothing of " + std::to_string(seconds) + " s of sound");
    }
    for (const mtmd_audio_mel & piece : pieces) {
        clip_image_f32 frames;
        frames.set_size({ (int) piece.n_len, (int) piece.n_mel }, /*is_placeholder =*/true, /*is_audio =*/true);
        list.add(frames, 1, true);
    }
}

}  // namespace

struct projector::loaded {
    mtmd_context context;

    loaded(const std::string & path, const mtmd_context_params & params) :
        context(path.c_str(), /*text_model =*/nullptr, params, /*no_alloc =*/true) {}
};

projector::projector(const std::string & path, bool flash_attn, uint32_t min_tokens, uint32_t max_tokens) {
    mtmd_context_params params = mtmd_context_params_default();
    params.use_gpu             = true;
    params.device              = split_devices(1)[0];
    params.n_threads           = 1;
    params.warmup              = false;
    params.flash_attn_type     = flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.image_min_tokens    = min_tokens ? (int) min_tokens : -1;
    params.image_max_tokens    = max_tokens ? (int) max_tokens : -1;
    mtmd                       = std::make_unique<loaded>(path, params);
}

projector::~projector() = default;

std::vector<projector_part> projector::parts() const {
    std::vector<projector_part> found;
    for (const clip_ctx * part : { mtmd->context.ctx_v, mtmd->context.ctx_a }) {
        if (part) {
            found.push_back({ PROJECTOR_TYPE_NAMES[part->proj_type()], part->model.hparams.n_layer });
        }
    }
    return found;
}

void projector::log_to(void (*log)(enum ggml_log_level level, const char * text, void * user_data)) {
    mtmd_log_set(log, nullptr);
}

void projector::graphs(const std::vector<image_size> & images,
                       const std::vector<uint32_t> &   seconds,
                       const reader &                  read) const {
    const mtmd_context & context = mtmd->context;
    if (!images.empty() && !context.ctx_v) {
        throw std::runtime_error("the file has no projector of images");
    }
    if (!seconds.empty() && !context.ctx_a) {
        throw std::runtime_error("the file has no projector of sound");
    }
    call_list list;
    for (clip_ctx * part : { context.ctx_v, context.ctx_a }) {
        if (part) {
            list.add(clip_model_loader::get_dummy_batch(*part).entries.front(), 1, part == context.ctx_a);
        }
    }
    for (const image_size & size : images) {
        add_image(list, context, size);
    }
    for (const uint32_t n : seconds) {
        add_sound(list, context, n);
    }
    for (const clip_image_f32_batch & call : list.calls) {
        clip_ctx *                        part    = call.is_audio ? context.ctx_a : context.ctx_v;
        const std::unique_ptr<clip_graph> builder = clip_get_graph_builder(part, call);
        const clip_image_f32 &            image   = call.entries.front();
        projector_call                    sizes;
        sizes.audio    = call.is_audio;
        sizes.size     = { image.nx(), image.ny() };
        sizes.n_images = call.entries.size();
        read(sizes, builder->build());
    }
}
