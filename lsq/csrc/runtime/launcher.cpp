#include "launcher.h"

namespace lsq {

void LaunchList::add(const std::string& what, const Launch& launch, const uint64_t* words, size_t count,
                     const int64_t* begins, size_t parameters) {
    entries_.push_back({what, false, launches_.size()});
    launches_.push_back(launch);
    launches_.back().first_parameter = begins_.size();
    for (size_t i = 0; i < parameters; ++i) begins_.push_back(words_.size() + begins[i]);
    words_.insert(words_.end(), words, words + count);
}

void LaunchList::add(const std::string& what, const ProductCall& call) {
    entries_.push_back({what, true, products_.size()});
    products_.push_back(call);
}

void LaunchList::close() {
    for (size_t begin : begins_) parameters_.push_back(&words_[begin]);
}

int LaunchList::start(const Entry& entry, void* stream) {
    if (entry.is_product) {
        const ProductCall& call = products_[entry.index];
        const void* alpha = call.alphas ? call.alphas : &call.alpha;
        return call.product->run(call.a, call.b, call.out, alpha, call.workspace, call.workspace_bytes, stream);
    }
    const Launch& l = launches_[entry.index];
    return driver_.launch(l.function, l.grid[0], l.grid[1], l.grid[2], l.block[0], l.block[1], l.block[2],
                          l.shared_bytes, stream, parameters_.data() + l.first_parameter, nullptr);
}

int LaunchList::run(void* stream, std::string& message) {
    const Current current(driver_);
    if (current.status()) {
        message = "the context of a GPU cannot be used: " + driver_.explain(current.status());
        return current.status();
    }
    for (size_t i = 0; i < entries_.size(); ++i) {
        if (const int status = start(entries_[i], stream)) {
            message = explain(i, status);
            return status;
        }
    }
    return 0;
}

std::string LaunchList::explain(size_t entry, int status) const {
    const Entry& failed = entries_[entry];
    std::string text = "entry " + std::to_string(entry + 1) + " of " + std::to_string(entries_.size());
    text += ", " + failed.what;
    if (failed.is_product) return text + ": " + products_[failed.index].product->explain(status);
    const Launch& l = launches_[failed.index];
    const auto sizes = [](const std::array<unsigned, 3>& size) {
        return "(" + std::to_string(size[0]) + ", " + std::to_string(size[1]) + ", " + std::to_string(size[2]) + ")";
    };
    return text + ", grid " + sizes(l.grid) + ", block " + sizes(l.block) + ", " + std::to_string(l.shared_bytes) +
           " bytes of dynamic shared memory: " + driver_.explain(status);
}

}  // namespace lsq
