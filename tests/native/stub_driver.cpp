// A libcuda whose launches do nothing but count, or fail when told to: what a launch costs on the
// host.
#define API extern "C" __attribute__((visibility("default")))

static long launches = 0;
static int status_of_launches = 0;
static int capability = 9;

// CUlaunchAttribute and CUlaunchConfig.
struct Attribute {
    int id, padding, value[16];
};
struct Configuration {
    unsigned sizes[7];
    void* stream;
    const Attribute* attributes;
    unsigned count;
};
static bool overlapped = false;

API int cuInit(unsigned) { return 0; }
API int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
API int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
API int cuDeviceGetAttribute(int* value, int, int) { return *value = capability, 0; }
API int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &launches, 0; }
API int cuCtxGetCurrent(void** context) { return *context = &launches, 0; }
API int cuCtxPushCurrent_v2(void*) { return 0; }
API int cuCtxPopCurrent_v2(void**) { return 0; }
API int cuEventCreate(void** event, unsigned) { return *event = &launches, 0; }
API int cuEventRecord(void*, void*) { return 0; }
API int cuEventDestroy_v2(void*) { return 0; }
API int cuStreamWaitEvent(void*, void*, unsigned) { return 0; }
API int cuStreamIsCapturing(void*, int* capturing) { return *capturing = 0; }
API int cuModuleLoadData(void** module, const void*) { return *module = &launches, 0; }
API int cuModuleUnload(void*) { return 0; }
API int cuModuleGetFunction(void** function, void*, const char*) {
    return *function = &launches, 0;
}
API int cuFuncGetAttribute(int* value, int, void*) { return *value = 0; }
API int cuFuncSetAttribute(void*, int, int) { return 0; }
API int cuLaunchKernelEx(const Configuration* given, void*, void** values, void**) {
    overlapped = given->count == 1 && given->attributes->id == 6 && *given->attributes->value == 1;
    launches += *static_cast<long*>(values[0]) != 0;
    return status_of_launches;
}
API int cuGetErrorName(int, const char** text) { return *text = "CUDA_ERROR_INVALID_VALUE", 0; }
API int cuGetErrorString(int, const char** text) { return *text = "invalid argument", 0; }

API void stub_capability(int major) { capability = major; }
// Whether the last launch may start before the one before it has ended.
API bool stub_overlapped() { return overlapped; }
API long stub_launches() { return launches; }
API void stub_fail(int status) { status_of_launches = status; }
