// Values by key, for any thread: whoever asks first makes one, the others wait for it.
#pragma once

#include <functional>
#include <future>
#include <map>
#include <mutex>

namespace trainrt {

template <typename Key, typename Value>
class MadeOnce {
 public:
  // The reference stays valid. What `make` throws is thrown to all who ask. It may ask for the
  // values of other keys, but must not wait for work that asks for its own.
  const Value& at(const Key& key, const std::function<Value()>& make) {
    std::shared_future<Value> value;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::shared_future<Value>& known = values_[key];
      if (!known.valid()) {
        known = std::async(std::launch::deferred, make).share();
      }
      value = known;
    }
    return value.get();
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::shared_future<Value>> values_;
};

}  // namespace trainrt
