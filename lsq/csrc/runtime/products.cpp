// C interface of cublaslt.h. Every call returns a Status (0: success) and fills `message`
// otherwise.
#include <algorithm>
#include <cstring>

#include "cublaslt.h"

#define LSQ_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Library = std::shared_ptr<lsq::CublasLt>;
constexpr int64_t kUnexpected = -2;

struct Message {
    char* text;
    int64_t bytes;

    void write(const std::string& words) const {
        if (bytes <= 0) return;
        const size_t length = std::min<size_t>(words.size(), bytes - 1);
        std::memcpy(text, words.data(), length);
        text[length] = '\0';
    }
};

template <typename Body>
int64_t guarded(Message message, Body body) {
    try {
        body();
        return lsq::kSuccess;
    } catch (const lsq::Error& error) {
        message.write(error.what());
        return error.status;
    } catch (const std::exception& error) {
        message.write(error.what());
        return kUnexpected;
    }
}

lsq::Algorithm copied(const void* bytes) {
    lsq::Algorithm algorithm;
    std::memcpy(&algorithm, bytes, sizeof algorithm);
    return algorithm;
}

}  // namespace

LSQ_EXPORT int64_t lsq_product_open(const char* path, Library** library, char* text,
                                    int64_t bytes) {
    return guarded({text, bytes},
                   [&] { *library = new Library(std::make_shared<lsq::CublasLt>(path)); });
}

// Products keep the library open.
LSQ_EXPORT void lsq_product_close(Library* library) { delete library; }

LSQ_EXPORT int64_t lsq_product_version(Library* library) {
    return static_cast<int64_t>((*library)->version());
}

LSQ_EXPORT int64_t lsq_product_create(Library* library, const lsq::ProductSpec* spec,
                                      lsq::MatrixProduct** product, char* text, int64_t bytes) {
    return guarded({text, bytes}, [&] { *product = new lsq::MatrixProduct(*library, *spec); });
}

LSQ_EXPORT void lsq_product_destroy(lsq::MatrixProduct* product) { delete product; }

// Up to `limit` algorithms of 64 bytes each, with the workspace of each.
LSQ_EXPORT int64_t lsq_product_candidates(const lsq::MatrixProduct* product,
                                          int64_t workspace_bytes, int64_t limit, void* algorithms,
                                          int64_t* workspaces, int64_t* count, char* text,
                                          int64_t bytes) {
    return guarded({text, bytes}, [&] {
        const auto found = product->candidates(workspace_bytes, static_cast<int>(limit));
        *count = static_cast<int64_t>(found.size());
        for (size_t i = 0; i < found.size(); ++i) {
            std::memcpy(static_cast<lsq::Algorithm*>(algorithms) + i, &found[i].algorithm,
                        sizeof(lsq::Algorithm));
            workspaces[i] = static_cast<int64_t>(found[i].workspace_bytes);
        }
    });
}

LSQ_EXPORT int64_t lsq_product_check(const lsq::MatrixProduct* product, const void* algorithm,
                                     int64_t* workspace_bytes, char* text, int64_t bytes) {
    return guarded({text, bytes}, [&] {
        *workspace_bytes = static_cast<int64_t>(product->check(copied(algorithm)).workspace_bytes);
    });
}

LSQ_EXPORT int64_t lsq_product_choose(lsq::MatrixProduct* product, const void* algorithm,
                                      char* text, int64_t bytes) {
    return guarded({text, bytes}, [&] { product->choose(copied(algorithm)); });
}

LSQ_EXPORT int64_t lsq_product_run(const lsq::MatrixProduct* product, const void* a, const void* b,
                                   void* out, void* workspace, int64_t workspace_bytes,
                                   void* stream, char* text, int64_t bytes) {
    const int status =
        product->run(a, b, out, workspace, static_cast<size_t>(workspace_bytes), stream);
    if (status != lsq::kSuccess) Message{text, bytes}.write(product->explain(status));
    return status;
}
