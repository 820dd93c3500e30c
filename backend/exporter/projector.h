// The graphs of a projector: what llama.cpp's mtmd computes of an image or of sound, from the header of an --mmproj file.

#pragma once

#include "ggml-cpp.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

// Pixels of an image.
struct image_size {
    int32_t width;
    int32_t height;
};

// What a projector computes at once: images of one size, or a piece of sound. For sound the width is its frames, the height what
// a frame has.
struct projector_call {
    bool       audio;
    image_size size;
    size_t     n_images;
};

// What is known of one of the projectors of a file: there may be one for images and one for sound.
struct projector_part {
    std::string type;  // llama.cpp's name: gemma3, ultravox
    int         layers;
};

class projector {
  public:
    // Loads what a file says of projectors, without memory for their weights. Throws std::runtime_error where llama.cpp refuses it.
    //
    // min_tokens, max_tokens  that an image of any size has; 0: as the file says
    projector(const std::string & path, bool flash_attn, uint32_t min_tokens, uint32_t max_tokens);
    ~projector();

    std::vector<projector_part> parts() const;

    // What llama.cpp complains of and what it says goes there.
    static void log_to(void (*log)(enum ggml_log_level level, const char * text, void * user_data));

    using reader = std::function<void(const projector_call & call, ggml_cgraph * graph)>;

    // Passes the graphs of llama.cpp's warm-up to `read`, then those of images and sound, each once: the sizes that llama.cpp
    // scales and cuts images of these sizes to, and that it cuts sound of so many seconds to.
    void graphs(const std::vector<image_size> & images,
                const std::vector<uint32_t> &   seconds,
                const reader &                  read) const;

  private:
    struct loaded;

    std::unique_ptr<loaded> mtmd;
};
