// The objects behind the client's opaque pointers. A pointer is looked up before use, so a null, invalid or freed pointer is an
// error and not a crash.

#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace simulator {

template <typename T> class handles {
  public:
    // Returns null for an unknown pointer.
    std::shared_ptr<T> find(const T * handle) const {
        const std::shared_lock<std::shared_mutex> lock(mutex_);
        const auto                                found = all_.find(handle);
        return found == all_.end() ? nullptr : found->second;
    }

    T * add(std::shared_ptr<T> object) {
        T * const                                 handle = object.get();
        const std::unique_lock<std::shared_mutex> lock(mutex_);
        all_.emplace(handle, std::move(object));
        return handle;
    }

    // Returns the object; null for an unknown pointer.
    std::shared_ptr<T> remove(const T * handle) {
        const std::unique_lock<std::shared_mutex> lock(mutex_);
        const auto                                found = all_.find(handle);
        if (found == all_.end()) {
            return nullptr;
        }
        std::shared_ptr<T> object = std::move(found->second);
        all_.erase(found);
        return object;
    }

    void clear() {
        std::unordered_map<const T *, std::shared_ptr<T>> gone;
        const std::unique_lock<std::shared_mutex>         lock(mutex_);
        all_.swap(gone);
    }

  private:
    mutable std::shared_mutex                         mutex_;
    std::unordered_map<const T *, std::shared_ptr<T>> all_;
};

}  // namespace simulator
