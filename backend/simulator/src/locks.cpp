#include "locks.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace simulator {

static bool lock_these(const std::string &           folder,
                       const std::vector<uint32_t> & cores,
                       std::vector<unique_fd> &      out,
                       bool &                        used,
                       std::string &                 error) {
    std::vector<unique_fd> taken;
    for (const uint32_t core : cores) {
        const std::string path = folder + "/core-" + std::to_string(core);
        used                   = access(path.c_str(), F_OK) == 0;
        unique_fd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
        if (!fd) {
            error = path + ": " + strerror(errno);
            return false;
        }
        if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
            error = errno == EWOULDBLOCK ? "another process has core " + std::to_string(core) + " (" + path + ")"
                                         : path + ": " + strerror(errno);
            return false;
        }
        taken.push_back(std::move(fd));
    }
    out = std::move(taken);
    return true;
}

bool lock_cores(const std::string &      folder,
                uint32_t                 any_of,
                std::vector<uint32_t> &  cores,
                std::vector<unique_fd> & out,
                bool &                   used,
                std::string &            error) {
    if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
        error = folder + ": " + strerror(errno);
        return false;
    }
    std::vector<uint32_t> wanted = cores;
    std::string           ignored;
    bool                  done = lock_these(folder, wanted, out, used, error);
    while (!done && wanted.back() + 1 < any_of) {
        for (uint32_t & core : wanted) {
            core++;
        }
        done = lock_these(folder, wanted, out, used, ignored);
    }
    if (done) {
        cores = wanted;
    }
    return done;
}

}  // namespace simulator
