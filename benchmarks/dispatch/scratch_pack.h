// A pack in a temporary file, which exists while this process needs it.

#pragma once

#include "tests/pack_builder.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

class scratch_pack {
  public:
    // Ends the program when it can't write to the folder for temporary files.
    explicit scratch_pack(const std::vector<test::kernel> & kernels) {
        std::error_code error;
        std::string     name = (std::filesystem::temp_directory_path(error) / "scratch-pack-XXXXXX").string();
        if (error || !mkdtemp(name.data())) {
            end("no folder can be made for temporary files");
        }
        folder_                 = name;
        const std::string bytes = test::make_pack(kernels).bytes();
        std::ofstream     file(path(), std::ios::binary);
        if (!file.write(bytes.data(), (std::streamsize) bytes.size()) || !file.flush()) {
            end(path() + " can't be written");
        }
    }

    ~scratch_pack() {
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }

    scratch_pack(const scratch_pack &)             = delete;
    scratch_pack & operator=(const scratch_pack &) = delete;

    std::string path() const { return (folder_ / "kernels.gguf").string(); }

  private:
    [[noreturn]] static void end(const std::string & message) {
        fprintf(stderr, "%s: set TMPDIR to a folder that can be written to\n", message.c_str());
        exit(1);
    }

    std::filesystem::path folder_;
};
