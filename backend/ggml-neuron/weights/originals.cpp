#include "weights/originals.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

// Returns the identity, size and time of the file at a path; "" if it is not a regular file.
static std::string state_of_file(const std::string & path) {
    struct stat s;
    if (stat(path.c_str(), &s) != 0 || !S_ISREG(s.st_mode)) {
        return "";
    }
    return std::to_string(s.st_dev) + ":" + std::to_string(s.st_ino) + " " + std::to_string(s.st_size) + " " +
           std::to_string(s.st_mtim.tv_sec) + "." + std::to_string(s.st_mtim.tv_nsec);
}

// Returns the path of the GGUF file whose shared, read-only mapping holds the bytes and starts at the file's beginning;
// else "".
static std::string mapped_gguf(const uint8_t * data, size_t n) {
    FILE * maps = fopen("/proc/self/maps", "re");
    if (!maps) {
        return "";
    }
    std::string path;
    char *      line = nullptr;
    size_t      room = 0;
    while (getline(&line, &room, maps) > 0) {
        unsigned long begin, end, offset, inode;
        char          access[5];
        int           name = 0;
        if (sscanf(line, "%lx-%lx %4s %lx %*s %lu %n", &begin, &end, access, &offset, &inode, &name) != 5 ||
            (uintptr_t) data < begin || (uintptr_t) data >= end) {
            continue;
        }
        if ((uintptr_t) data + n <= end && strcmp(access, "r--s") == 0 && offset == 0 && inode != 0 &&
            memcmp((const void *) begin, "GGUF", 4) == 0) {
            path.assign(line + name, strcspn(line + name, "\n"));
        }
        break;
    }
    free(line);
    fclose(maps);
    return path;
}

neuron_originals::~neuron_originals() {
    clear();
    if (memory) {
        munmap(memory, reserved);
    }
}

bool neuron_originals::reserve(size_t n_bytes) {
    reserved     = n_bytes;
    void * begin = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    memory       = begin == MAP_FAILED ? nullptr : (uint8_t *) begin;
    return memory != nullptr;
}

bool neuron_originals::keep_pages(size_t at, const uint8_t * data, size_t n) {
    pages p;
    p.path  = mapped_gguf(data, n);
    p.state = p.path.empty() ? "" : state_of_file(p.path);
    if (p.state.empty()) {
        return false;
    }
    p.first      = (uintptr_t) data % (size_t) sysconf(_SC_PAGESIZE);
    p.n          = n;
    p.size       = p.first + n;
    // for a shared mapping, size 0 keeps it and makes another mapping of the same pages
    void * begin = mremap((void *) (data - p.first), 0, p.size, MREMAP_MAYMOVE);
    if (begin == MAP_FAILED) {
        return false;
    }
    p.begin = (uint8_t *) begin;
    const std::lock_guard<std::mutex> lock(mutex);
    pages &                           known = files[at];
    if (known.begin) {
        munmap(known.begin, known.size);
    }
    known = p;
    return true;
}

// Returns "", or that the file was changed. Replacing the file is harmless: the pages are still the old file's.
std::string neuron_originals::pages::failure() const {
    const std::string now  = state_of_file(path);
    const size_t      file = state.find(' ');
    if (now == state || now.compare(0, file, state, 0, file) != 0) {
        return "";
    }
    return "the file " + path +
           " changed after the program loaded the weight from it\n"
           "no copy of the weight exists\n"
           "leave the file as it is while a program has it loaded, rename another one to it, or load without mmap";
}

// Copies the tensors that have bytes in files in a range, and drops their pages. Needs the mutex.
std::string neuron_originals::copy_pages(size_t at, size_t n) {
    for (auto i = files.begin(); i != files.end() && i->first < at + n;) {
        const pages & p = i->second;
        if (i->first + p.n <= at) {
            i++;
            continue;
        }
        const std::string failure = p.failure();
        if (!failure.empty()) {
            return failure;
        }
        memcpy(memory + i->first, p.data(), p.n);
        munmap(p.begin, p.size);
        i = files.erase(i);
    }
    return "";
}

std::string neuron_originals::write(size_t at, const uint8_t * data, size_t n) {
    const std::lock_guard<std::mutex> lock(mutex);
    const std::string                 failure = copy_pages(at, n);
    if (failure.empty()) {
        memcpy(memory + at, data, n);
    }
    return failure;
}

std::string neuron_originals::read(size_t at, uint8_t * data, size_t n) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto                        after = files.upper_bound(at);
    if (after != files.begin()) {
        const auto    found = std::prev(after);
        const pages & p     = found->second;
        if (at + n <= found->first + p.n) {
            const std::string failure = p.failure();
            if (failure.empty()) {
                memcpy(data, p.data() + (at - found->first), n);
                madvise(p.begin, p.size, MADV_DONTNEED);  // they are in the system's cache of the file
            }
            return failure;
        }
    }
    const std::string failure = copy_pages(at, n);
    if (failure.empty()) {
        memcpy(data, memory + at, n);
    }
    return failure;
}

void neuron_originals::clear() {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto & entry : files) {
        munmap(entry.second.begin, entry.second.size);
    }
    files.clear();
    if (memory) {
        madvise(memory, reserved, MADV_DONTNEED);
    }
}

size_t neuron_originals::in_files() {
    const std::lock_guard<std::mutex> lock(mutex);
    size_t                            n = 0;
    for (const auto & entry : files) {
        n += entry.second.n;
    }
    return n;
}
