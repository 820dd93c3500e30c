// Originals of weights in layouts that lose information: pages of the model's file if the program mapped it, else
// copies.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

// The originals of one buffer's contents, by their offset in ggml's order.
class neuron_originals {
  public:
    neuron_originals() = default;
    ~neuron_originals();
    neuron_originals(const neuron_originals &) = delete;

    // Reserves addresses for the originals of a buffer. They take no memory until written to. Returns whether it
    // succeeded.
    bool reserve(size_t n_bytes);

    explicit operator bool() const { return memory != nullptr; }

    // Keeps a tensor as pages of a GGUF file. Returns false unless `data` is in a shared, read-only mapping of such a
    // file (as in llama.cpp), and the file system reports changes of the file.
    bool keep_pages(size_t at, const uint8_t * data, size_t n);

    // Copies bytes. If the tensor is in pages of a file, also copies its other bytes. Returns "", or why these can't be
    // read any more.
    std::string write(size_t at, const uint8_t * data, size_t n);

    // Returns the address of bytes that are not in a file.
    const uint8_t * copy_of(size_t at) const { return memory + at; }

    // Reads bytes. Returns "", or why they can't be read any more.
    std::string read(size_t at, uint8_t * data, size_t n);

    // Sets all bytes to 0.
    void clear();

    // Returns the number of bytes that are in files.
    size_t in_files();

  private:
    // A second mapping of the pages of a file that hold a tensor.
    struct pages {
        uint8_t *   begin = nullptr;
        size_t      size  = 0;
        size_t      first = 0;  // first byte of the tensor
        size_t      n     = 0;  // number of its bytes
        std::string path;
        std::string state;      // state of the file when the pages were mapped

        const uint8_t * data() const { return begin + first; }

        std::string failure() const;
    };

    std::string copy_pages(size_t at, size_t n);

    uint8_t *               memory   = nullptr;
    size_t                  reserved = 0;
    std::mutex              mutex;  // locked while files are examined
    std::map<size_t, pages> files;  // by the beginning of the tensor
};
